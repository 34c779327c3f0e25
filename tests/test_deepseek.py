"""Layers behind the last in Hugging Face files: read where the model has them, passed over where it has not."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from maxhydra.config import model as config
from maxhydra.convert.hf_write import family_of, write_hf
from maxhydra.convert.load import load_weights
from maxhydra.model import build
from tests.golden_models import Golden

GOLDEN = Path(__file__).parent / "golden" / "deepseek3"
# As the published files have them (DeepSeek-V3, README_WEIGHTS.md): a layer's tensors, and these.
ADDED = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}


def names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="numpy") as opened:
        return set(opened.keys())


def test_layers_behind_the_last_count_on_from_it(tmp_path):
    golden = Golden(GOLDEN)
    model = build(dataclasses.replace(golden.model.config, mtp=config.Mtp(depth=1)))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), model.shapes["mtp"])
    params = {**golden.params, "mtp": drawn}
    write_hf(tmp_path, model, params, table=family_of(model, None), dtype=np.dtype("float32"), extra={})
    of_layer = {name.removeprefix("model.layers.2.") for name in names(tmp_path) if ".layers.2." in name}
    behind = {name.removeprefix("model.layers.3.") for name in names(tmp_path) if ".layers.3." in name}
    assert behind - of_layer == ADDED and of_layer <= behind

    # Published files repeat the two ends of the model there.
    tensors = load_file(tmp_path / "model.safetensors")
    ends = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    tensors |= {f"model.layers.3.{ours}.weight": tensors[f"{theirs}.weight"] for ours, theirs in ends.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for wanted, expected in ((model, params), (golden.model, golden.params)):
        found = load_weights(str(tmp_path), wanted, shardings=None, dtype="float32")
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found, expected)))
