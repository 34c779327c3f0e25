"""Conversion holds a few tensors at a time, however large the model. bench/convert_memory.py measures a large one."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from maxhydra.convert.arrays import FileArrays
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_config import build_model
from maxhydra.convert.hf_write import write_hf, write_safetensors
from maxhydra.convert.orbax_io import write_checkpoint
from maxhydra.convert.param_map import map_params
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


def synthetic(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    model = build(build_model("", "", TABLE.to_model(SETTINGS)))
    rows = [
        (place.tensor_name(tensor), place.layout.hf_shape)
        for place in map_params(TABLE, model)
        for tensor in place.tensors
    ]
    rng = np.random.default_rng(0)
    write_safetensors(
        folder / "model.safetensors", dict(rows), (rng.normal(size=s).astype(FLOAT) for _, s in rows), dtype=FLOAT
    )


@pytest.mark.parametrize("form", ["hf", "maxhydra"])
def test_a_model_of_many_layers_never_lies_in_memory(form: str, tmp_path: Path) -> None:
    synthetic(tmp_path / "in")
    source = hf_source("", "", tmp_path / "in")
    model = build(source.model)
    arrays = FileArrays(source, model)
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    try:
        if form == "hf":
            write_hf(tmp_path / "out", model, arrays, table=TABLE, dtype=FLOAT, extra={})
        else:
            write_checkpoint(tmp_path / "out", model, arrays, dtype=FLOAT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    whole, largest = 4 * parameter_count(model.shapes), 4 * 512 * 64
    assert whole > 100 * largest and peak < 0.25 * whole, (peak, whole)
    if form == "hf":
        assert (tmp_path / "out/model.safetensors").stat().st_size == (tmp_path / "in/model.safetensors").stat().st_size
        again = hf_source("", "", tmp_path / "out")
        assert again.shapes == source.shapes
        assert all(np.array_equal(again.read(name), source.read(name)) for name in source.shapes)
