"""Compressed attention on a mesh, experts by token id, and rejected settings.

tests/parity compares with transformers, test_recurrent_mixers.py caches and packed rows with one forward pass.
"""

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.options import model_option
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh

TOKENS = np.random.default_rng(0).integers(0, 320, (4, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> ModelDef:
    return build(model_option("deepseek4-tiny"))


def logits(model: ModelDef, params, sharder: Sharder) -> np.ndarray:
    @jax.jit
    def run(params, tokens):
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        ctx = Context(positions=positions, segments=None, sharder=sharder, cache=None, dropout_key=None)
        return model.logits(params, model.hidden(params, tokens, ctx)[0], sharder)

    return np.asarray(run(params, TOKENS))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_mesh_gives_the_output_of_one_device(model):
    params = jax.jit(model.init)(jax.random.key(0))
    sharder = Sharder(build_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4]), RULES)
    model.check_mesh(sharder)
    placed = jax.device_put(params, sharder.tree(model.axes))
    expected = logits(model, params, Sharder.single())
    np.testing.assert_allclose(logits(model, placed, sharder), expected, atol=1e-4)
    assert np.abs(expected).max() > 0.1


@pytest.mark.slow
def test_split_sequences_are_rejected(model):
    sharder = Sharder(build_mesh(Mesh(sequence=2), jax.devices()[:2]), RULES)
    with pytest.raises(ConfigError, match=r"mesh\.sequence=2.*compressed"):
        jax.eval_shape(lambda params: logits(model, params, sharder), model.shapes)


def test_experts_by_token_stay_as_they_are(model):
    """The table has distinct experts, and an optimizer step does not change it."""
    table = jax.eval_shape(model.init, jax.random.key(0))["prefix"]["0"]["mlp"]["router"]["table"]
    assert table.shape == (320, 2) and table.dtype == np.float32
    old = {"router": {"table": np.array([[0.0, 4.0]])}}
    new = {"router": {"table": 0.9 * old["router"]["table"]}}
    spec = model._spec.prefix[0].feed_forward
    assert spec.apply_aux_updates(new, old, {})["router"]["table"] is old["router"]["table"]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["model.kinds.dense.compressed.out_groups=3"], "out_groups"),
        (["model.kinds.window.compressed.overlap=true"], "overlap"),
        (["model.kinds.sparse.compressed.indexer.head_dim=8"], "indexer.head_dim"),
        (["model.kinds.sparse.moe.router.by_token=true"], "by_token"),
        (["model.kinds.sparse.moe.clamp=7"], "limit"),
        (["model.hyper_connections.streams=1"], "form"),
        (["model.mtp.depth=1"], "mtp.depth"),
        (["task=decode", "task.prompt=a", "task.engine.page_size=8"], "page_size"),
        (["task=decode", "task.prompt=a", "task.engine.prefix_cache=true"], "prefix_cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_settings_are_rejected(overrides, path):
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        compose(["model=deepseek4-tiny", *overrides])
