"""Conversion holds a few tensors in memory at a time; bench/convert_memory.py measures a large model."""

import json
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_config import build_model
from maxhydra.convert.hf_write import StoredTensor, write_hf, write_safetensors
from maxhydra.convert.orbax_io import write_checkpoint
from maxhydra.convert.param_map import map_params
from maxhydra.convert.streaming import FileArrays
from maxhydra.convert.tables.llama import TABLE
from maxhydra.model import build, parameter_count

SETTINGS = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
FLOAT = np.dtype("float32")


def write_random_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    model = build(build_model("", "", TABLE.to_model(SETTINGS)))
    rows = [
        (mapping.tensor_name(tensor), mapping.layout.hf_shape)
        for mapping in map_params(TABLE, model)
        for tensor in mapping.tensors
    ]
    rng = np.random.default_rng(0)

    def sample(shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=shape).astype(FLOAT)

    tensors = [StoredTensor(name, shape, FLOAT, partial(sample, shape)) for name, shape in rows]
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.mark.slow
@pytest.mark.default_cases("hf")
@pytest.mark.parametrize("output_format", ["hf", "maxhydra"])
def test_peak_memory_is_a_fraction_of_the_model(output_format: str, tmp_path: Path) -> None:
    write_random_model(tmp_path / "in")
    source = hf_source("", "", tmp_path / "in")
    model = build(source.model)
    arrays = FileArrays(source, model)
    peaks = []
    # The interpreter may enlarge its own tables, and other threads allocate, during some of them.
    for name in ("first", "second", "out"):
        (tmp_path / name).mkdir()
        tracemalloc.start()
        try:
            if output_format == "hf":
                write_hf(tmp_path / name, model, arrays, table=TABLE, dtype=FLOAT, extra={})
            else:
                write_checkpoint(tmp_path / name, model, arrays, dtype=FLOAT)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    peak = min(peaks)
    total, largest = 4 * parameter_count(model.shapes), 4 * 512 * 64
    assert total > 100 * largest and peak < 0.25 * total, (peak, total)
    if output_format == "hf":
        assert (tmp_path / "out/model.safetensors").stat().st_size == (tmp_path / "in/model.safetensors").stat().st_size
        again = hf_source("", "", tmp_path / "out")
        assert again.shapes == source.shapes
        assert all(np.array_equal(again.read(name), source.read(name)) for name in source.shapes)
