"""QK-Clip against Algorithm 1 of the Kimi K2 report in NumPy, and in a training step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.run import Train
from maxhydra.layers import Context
from maxhydra.layers.qk_clip import HEAD_LOGITS
from maxhydra.model import ModelDef, build
from maxhydra.optim import Optimizer
from maxhydra.train import next_token_loss
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step
from tests.layers.test_latent_block import NARROW
from tests.support import mechanism_checks as checks

THRESHOLD, N = 0.165, 4
ROPE = config.Rope(kind=config.RopeKind.none)
MULTI = config.Attention(num_kv_heads=N, bias=config.AttentionBias.qkv, rope=ROPE)
LATENT = config.Mla(q_lora_rank=6, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, rope=ROPE)
KINDS = {
    "multi": config.Kind(attention=MULTI),
    "grouped": config.Kind(attention=config.Attention(rope=ROPE)),
    "latent": config.Kind(mixer=config.Mixer.mla, mla=LATENT),
}


def clipped(name: str) -> ModelDef:
    model = dataclasses.replace(NARROW, num_layers=1, pattern=[name], kinds=KINDS, qk_clip=THRESHOLD)
    assert not list(model.check())
    return build(model)


def largest_logits(model: ModelDef, params: Any, ids: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    ctx = Context(positions=positions, segments=None, sharder=checks.SINGLE, cache=None, dropout_key=None)
    return np.asarray(model.forward(params, jnp.asarray(ids), ctx).aux["pattern"]["0"]["attention"][HEAD_LOGITS][0])


def expected_weights(name: str, weights: Any, factors: np.ndarray) -> Any:
    """Algorithm 1: sqrt(g) for query and key, g for the queries of a key that heads share."""
    roots = np.sqrt(factors)
    if name == "latent":
        query, both = weights["query_up"]["kernel"].copy(), weights["key_value"]["kernel"].copy()
        for head in range(N):
            query[..., head, :4] *= roots[head]
            query[..., head, 4:] *= factors[head]
            both[..., head, :4] *= roots[head]
        return {**weights, "query_up": {"kernel": query}, "key_value": {"kernel": both}}
    on_query, changed = (roots, ("query", "key")) if name == "multi" else (factors, ("query",))
    scaled = {n: {leaf: on_query[:, None] * weights[n][leaf] for leaf in weights[n]} for n in changed}
    return {**weights, **scaled}


@pytest.mark.slow
@pytest.mark.default_cases("latent", "multi")
@pytest.mark.parametrize("name", sorted(KINDS))
def test_projections_of_large_heads_are_rescaled(name: str) -> None:
    model = clipped(name)
    params = checks.random_params(model)
    ids = np.random.default_rng(1).integers(0, 32, (2, 8)).astype(np.int32)
    before = largest_logits(model, params, ids)
    assert np.any(before > THRESHOLD)
    aux = {"pattern": {"0": {"attention": {HEAD_LOGITS: before[None]}}}}
    new = model.apply_aux_updates(params, params, aux)
    attention = jax.tree.map(np.asarray, params["pattern"]["0"]["attention"])
    expected = expected_weights(name, attention, np.minimum(1, THRESHOLD / before))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), new["pattern"]["0"]["attention"], expected)
    # The same batch now has logits of at most the threshold: exactly that where the head was clipped.
    np.testing.assert_allclose(largest_logits(model, new, ids), np.minimum(before, THRESHOLD), rtol=1e-4)


@pytest.mark.slow
def test_logits_of_heads_match_numpy_and_a_step_clips_over_microbatches() -> None:
    model = clipped("grouped")
    params = checks.random_params(model)
    ids = np.random.default_rng(1).integers(0, 32, (2, 8)).astype(np.int32)
    weights = jax.tree.map(lambda x: np.asarray(x[0], np.float64), params["pattern"]["0"])
    x = np.asarray(params["embedding"]["table"], np.float64)[ids]
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * weights["attention_norm"]["scale"]
    query, key = (np.einsum("btd,dnh->btnh", x, weights["attention"][name]["kernel"]) for name in ("query", "key"))
    logits = np.einsum("btnh,bsnh->bnts", query, np.repeat(key, 2, axis=2)) * 8**-0.5
    expected = np.where(np.tril(np.ones((8, 8), bool)), logits, -np.inf).max(axis=(0, 2, 3))
    np.testing.assert_allclose(largest_logits(model, params, ids), expected, rtol=1e-4)

    train = Train(grad_accum=2)
    transform = optax.sgd(1e-9)
    optimizer = Optimizer(
        transform, lambda step: jnp.asarray(1e-9), optax.global_norm, jax.tree.map(lambda _: True, params)
    )
    rest = {"opt_state": transform.init(params), "key": jax.random.key_data(jax.random.key(0)), "history": {}}
    state = TrainState(step=jnp.zeros((), jnp.int32), params=params, frozen={}, guard=Guard.fresh(), **rest)
    step = make_step(next_token_loss(model, checks.SINGLE, train), optimizer, train, model.apply_aux_updates)
    positions = np.broadcast_to(np.arange(8), ids.shape)
    batch = {"tokens": ids, "targets": ids, "positions": positions, "weights": jnp.ones(ids.shape)}
    moved, metrics = jax.jit(step)(state, batch)
    np.testing.assert_allclose(metrics["attention/logit_max"], expected.max(), rtol=1e-4)
    np.testing.assert_allclose(largest_logits(model, moved.params, ids), np.minimum(expected, THRESHOLD), rtol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["model.kinds.layer.attention.qk_norm=head"], "model.kinds.layer.attention.qk_norm"),
        (["model.kinds.layer.mixer=delta"], "model.qk_clip"),
        (["adapter=lora"], "model.qk_clip"),
        (["optimizer=schedule_free"], "optimizer.kind"),
    ],
)
def test_unsupported_combinations_are_rejected(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        compose(["model=tiny", "model.qk_clip=100", *overrides])
