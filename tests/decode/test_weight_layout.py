"""Weights laid out for decoding give what the model gives with its own."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema import model as config
from maxhydra.decode.weight_layout import _Flat, choose_weight_layout, flattened
from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder


@cache
def model() -> ModelDef:
    sizes = {"num_layers": 7, "emb_dim": 24, "mlp_dim": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    kinds = {"local": config.Kind(attention=config.Attention(window=3)), "global": config.Kind()}
    # Layers of one branch. Keys are as wide as values, so that the three projections can be stored as one.
    ssm = config.Ssm(num_heads=4, head_dim=6, num_groups=2, state_dim=6)
    kinds["ssm"] = config.Kind(mixer=config.Mixer.ssm, ssm=ssm, feed_forward=config.FeedForward.none)
    kinds["mlp"] = config.Kind(mixer=config.Mixer.none)
    fields = {**sizes, "vocab_size": 50, "context_length": 64, "kinds": kinds, "pattern": ["local", "global"]}
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    return build(config.Model(**fields, prefix=["ssm", "mlp", "global"], head=config.Head.separate, dtypes=dtypes))


def logits(model: ModelDef, params: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """Logits after the tokens, read one by one with a cache."""

    @jax.jit
    def read(params: Any, tokens_B1: jax.Array, positions_B1: jax.Array, cache: Any) -> Any:
        context = Context(
            positions=positions_B1, segments=None, sharder=Sharder.single(), cache=cache, dropout_key=None
        )
        hidden, cache = model.hidden(params, tokens_B1, context)
        return model.logits(params, hidden, Sharder.single()), cache

    cache, found = model.empty_cache(DenseCacheSpec(len(tokens_BT), 8)), []
    for position in range(tokens_BT.shape[1]):
        column = tokens_BT[:, position : position + 1]
        last, cache = read(params, jnp.asarray(column), jnp.full(column.shape, position), cache)
        found.append(last)
    return np.concatenate(found, axis=1)


@cache
def params_tokens_and_logits(rows: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Random weights, random tokens, and the logits of the model with its own layout."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model().shapes)
    tokens = rng.integers(0, 50, (rows, 5))
    return params, tokens, logits(model(), params, tokens)


@pytest.mark.slow
@pytest.mark.default_cases("3-gpu")
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layout_changes_nothing(platform: str, rows: int) -> None:
    params, tokens, expected = params_tokens_and_logits(rows)
    arranged = choose_weight_layout(model(), Sharder.single(), platform)
    found = logits(arranged.model, arranged.use(arranged.keep(params)), tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_layers_of_a_stack_share_a_program() -> None:
    plain = model()
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plain.shapes)
    flat = _Flat(plain, flattened(plain, config.Projection.outputs_first), joins=False)
    flat.keep(params)
    # One program for each layer of the prefix, and one for the layers of each of the two places in the pattern.
    assert flat._convert_layer._cache_size() == 3 + 2
