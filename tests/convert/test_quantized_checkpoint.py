"""Checkpoints in fewer bits: what task=convert writes, and what decoding reads of it."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.mesh import Mesh
from maxhydra.convert.arrays import InMemoryArrays
from maxhydra.convert.load import load_weights
from maxhydra.convert.orbax_io import write_checkpoint
from maxhydra.decode.open import weight_formats
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, convert
from maxhydra.train import plan_states
from maxhydra.train.checkpoint import open_checkpointer

MODEL = [
    *("model.num_layers=3", "model.emb_dim=64", "model.mlp_dim=128", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=16", "model.vocab_size=300", "train.seq_len=32", "model.dtypes.compute=bfloat16"),
]


# Of the bytes that the weights have in bfloat16; here the ends, which are in int8 either way, are half of the model.
SHARES = {"int8_weights": 0.54, "int4_weights": 0.40}


def asked(source: Path, *overrides: str) -> Config:
    return compose([*MODEL, f"checkpoint.load_parameters={source}", *overrides]).config


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a run leaves it."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    config = compose([*MODEL, "checkpoint.mode=synchronous"]).config
    saver = open_checkpointer(folder, config.checkpoint)
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules)
    saver.save(1, plan_states(config, sharder).create(0), {}, {})
    saver.close()
    return folder


def converted(source: Path, output: Path, *overrides: str) -> Path:
    config = asked(source, "task=convert", f"task.output={output}", "task.format=maxhydra", *overrides)
    job: Any = Job(config, {}, None, None)  # type: ignore[arg-type]
    convert.run(job)
    return output


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same in fewer bits, by kind."""
    folder = tmp_path_factory.mktemp("packed")
    return {kind: converted(plain, folder / kind, f"quantization={kind}") for kind in SHARES}


def loaded(config: Config, sharder: Sharder | None = None) -> tuple[ModelDef, Any]:
    model = build(config.model, quantization=weight_formats(config))
    shardings = None if sharder is None else sharder.tree(model.base.axes)
    source = config.checkpoint.load_parameters
    assert source is not None
    return model, load_weights(source, model, shardings=shardings, dtype=config.model.dtypes.compute.value)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("kind", "share"), SHARES.items())
def test_it_is_read_as_quantising_while_loading_would_have_it(
    kind: str, share: float, plain: Path, packed: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    out = packed[kind]
    _, expected = loaded(asked(plain, f"quantization={kind}"))
    before = size(jax.live_arrays())
    with caplog.at_level(logging.INFO, logger="maxhydra"):
        model, found = loaded(asked(out))
    assert f"holds weights in {kind}" in caplog.text
    assert_same(found, expected)
    # In bfloat16 a weight takes two bytes; nothing of that size was made.
    in_bfloat16 = 2 * sum(leaf.size for leaf in jax.tree.leaves(model.base.shapes))
    assert size(found) < share * in_bfloat16
    assert size(jax.live_arrays()) - before <= size(found) + 2**12


@pytest.mark.parametrize(("kind", "share"), [("int8_weights", 0.52), ("int4_weights", 0.30)])
def test_it_is_as_small_on_disk(kind: str, share: float, tmp_path: Path) -> None:
    sizes = ["model.num_layers=1", "model.emb_dim=256", "model.mlp_dim=6144", "model.head=tied"]
    config = compose([*MODEL, *sizes, f"quantization={kind}"]).config
    model = build(config.model, quantization=config.quantization)
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), model.base.shapes)
    write_checkpoint(tmp_path, model, InMemoryArrays(drawn), dtype=jnp.dtype(jnp.bfloat16))
    in_bfloat16 = 2 * sum(leaf.size for leaf in jax.tree.leaves(drawn))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < share * in_bfloat16


def test_it_goes_to_any_mesh(packed: dict[str, Path]) -> None:
    out = packed["int8_weights"]
    sharder = Sharder(build_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4]), asked(out).mesh.rules)
    model, found = loaded(asked(out), sharder)
    kernel = found["pattern"]["0"]["mlp"]["up"]["kernel"]
    assert kernel["codes"].sharding == sharder.tree(model.axes)["pattern"]["0"]["mlp"]["up"]["kernel"]["codes"]
    assert_same(found, loaded(asked(out))[1])


def test_what_does_not_fit_is_refused(plain: Path, packed: dict[str, Path], tmp_path: Path) -> None:
    out = packed["int4_weights"]
    with pytest.raises(ConfigError, match=r"holds weights in int4_weights\s*leave quantization out"):
        loaded(asked(out, "quantization=int8_weights"))
    with pytest.raises(ConfigError, match=r"which groups of|quantization\.group"):
        loaded(asked(plain, "quantization=int4_weights", "quantization.group=48"))
    with pytest.raises(ConfigError, match=r"holds weights in int4_weights(?s:.*)task=decode, serve or score"):
        load_weights(str(out), build(asked(out).model), shardings=None, dtype=jnp.float32)
    with pytest.raises(ConfigError, match=r"is a way to train, not to decode \(qat_int8\)"):
        weight_formats(asked(plain, "quantization=qat_int8"))
    with pytest.raises(ConfigError, match=r"is not written by task.format=hf(?s:.*)task.format=maxhydra"):
        converted(plain, tmp_path / "hf", "quantization=int8_weights", "task.format=hf")
