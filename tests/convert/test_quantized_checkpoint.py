"""Quantized maxhydra checkpoints: written by task=convert, loaded by task=decode."""

import gc
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.hardware import Mesh
from maxhydra.convert.load import load_weights
from maxhydra.convert.orbax_io import write_checkpoint
from maxhydra.convert.streaming import InMemoryArrays
from maxhydra.decode.open import weight_quantization
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, convert
from maxhydra.train import plan_states
from maxhydra.train.checkpoint import open_checkpointer

MODEL = [
    *("model.num_layers=3", "model.emb_dim=64", "model.mlp_dim=128", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=16", "model.vocab_size=300", "train.seq_len=32", "model.dtypes.compute=bfloat16"),
]


# Upper bound of the size relative to bfloat16; embedding and head are half of this model and int8 in both cases.
SHARES = {"int8_weights": 0.54, "int4_weights": 0.40}


def composed(source: Path, *overrides: str) -> Config:
    return compose([*MODEL, f"checkpoint.load_parameters={source}", *overrides]).config


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unquantized checkpoint of a run."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    config = compose([*MODEL, "checkpoint.mode=synchronous"]).config
    saver = open_checkpointer(folder, config.checkpoint)
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules)
    saver.save(1, plan_states(config, sharder).create(0), {}, {})
    saver.close()
    return folder


def converted(source: Path, output: Path, *overrides: str) -> Path:
    config = composed(source, "task=convert", f"task.output={output}", "task.format=maxhydra", *overrides)
    job: Any = Job(config, {}, None, None)  # type: ignore[arg-type]
    convert.run(job)
    return output


@pytest.fixture(scope="module")
def quantized(unquantized: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights quantized, by kind."""
    folder = tmp_path_factory.mktemp("quantized")
    return {kind: converted(unquantized, folder / kind, f"quantization={kind}") for kind in SHARES}


def loaded(config: Config, sharder: Sharder | None = None) -> tuple[ModelDef, Any]:
    model = build(config.model, quantization=weight_quantization(config))
    shardings = None if sharder is None else sharder.tree(model.base.axes)
    source = config.checkpoint.load_parameters
    assert source is not None
    return model, load_weights(source, model, shardings=shardings, dtype=config.model.dtypes.compute.value)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.default_cases("int4_weights-0.4")
@pytest.mark.parametrize(("kind", "share"), SHARES.items())
def test_loading_equals_quantizing_while_loading(
    kind: str, share: float, unquantized: Path, quantized: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    out = quantized[kind]
    _, expected = loaded(composed(unquantized, f"quantization={kind}"))
    before = size(jax.live_arrays())
    with caplog.at_level(logging.INFO, logger="maxhydra"):
        model, params = loaded(composed(out))
    assert f"is quantized to {kind}" in caplog.text
    assert_same(params, expected)
    # No array of the size of the bfloat16 weights was allocated.
    in_bfloat16 = 2 * sum(leaf.size for leaf in jax.tree.leaves(model.base.shapes))
    assert size(params) < share * in_bfloat16
    gc.collect()
    assert size(jax.live_arrays()) - before <= size(params) + 2**12


@pytest.mark.slow
@pytest.mark.default_cases("int4_weights-0.3")
@pytest.mark.parametrize(("kind", "share"), [("int8_weights", 0.52), ("int4_weights", 0.30)])
def test_size_on_disk(kind: str, share: float, tmp_path: Path) -> None:
    sizes = ["model.num_layers=1", "model.emb_dim=256", "model.mlp_dim=6144", "model.head=tied"]
    config = compose([*MODEL, *sizes, f"quantization={kind}"]).config
    model = build(config.model, quantization=config.quantization)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), model.base.shapes)
    write_checkpoint(tmp_path, model, InMemoryArrays(params), dtype=jnp.dtype(jnp.bfloat16))
    in_bfloat16 = 2 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < share * in_bfloat16


@pytest.mark.slow
def test_quantized_weights_are_sharded_over_the_mesh(quantized: dict[str, Path]) -> None:
    out = quantized["int8_weights"]
    sharder = Sharder(build_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4]), composed(out).mesh.rules)
    model, params = loaded(composed(out), sharder)
    kernel = params["pattern"]["0"]["mlp"]["up"]["kernel"]
    assert kernel["codes"].sharding == sharder.tree(model.axes)["pattern"]["0"]["mlp"]["up"]["kernel"]["codes"]
    assert_same(params, loaded(composed(out))[1])


@pytest.mark.slow
def test_equivalent_targets_load_the_same_weights(quantized: dict[str, Path]) -> None:
    """As in checkpoints that older versions have written."""
    targets = "quantization.targets=[attention/,mlp/,'^(embedding|head)$']"
    _, stored = loaded(composed(quantized["int8_weights"]))
    _, given = loaded(composed(quantized["int8_weights"], "quantization=int8_weights", targets))
    assert_same(given, stored)


@pytest.mark.slow
def test_incompatible_quantization_is_rejected(unquantized: Path, quantized: dict[str, Path], tmp_path: Path) -> None:
    out = quantized["int4_weights"]
    with pytest.raises(ConfigError, match=r"which is int4_weights\s*omit quantization"):
        loaded(composed(out, "quantization=int8_weights"))
    with pytest.raises(ConfigError, match=r"which groups of|quantization\.group"):
        loaded(composed(unquantized, "quantization=int4_weights", "quantization.group=48"))
    with pytest.raises(ConfigError, match=r"is quantized to int4_weights(?s:.*)task=decode, serve or score"):
        load_weights(str(out), build(composed(out).model), shardings=None, dtype=jnp.float32)
    with pytest.raises(ConfigError, match=r"is only supported for training \(qat_int8\)"):
        weight_quantization(composed(unquantized, "quantization=qat_int8"))
    with pytest.raises(ConfigError, match=r"is not supported by task.format=hf(?s:.*)task.format=maxhydra"):
        converted(unquantized, tmp_path / "hf", "quantization=int8_weights", "task.format=hf")
