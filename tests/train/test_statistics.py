"""Statistics of layers against NumPy on gradients, parameters and activations computed outside the step."""

import dataclasses
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import Config
from maxhydra.kernels.attention.spec import Request
from maxhydra.layers import Context, attention, mlp
from maxhydra.layers import statistics as layer_statistics
from maxhydra.sharding import Sharder
from maxhydra.train import next_token_loss
from maxhydra.train.compile import trace_step
from maxhydra.train.state import StateFactory, TrainState
from maxhydra.train.statistics import STATISTICS, flatten
from tests.support.states import ROWS, plan

LENGTH, LAYERS, UNITS = 32, 2, 64
DEAD = 10


def batch(sharder: Sharder) -> dict[str, jax.Array]:
    """Rows of two documents and some padding, a part of the tokens without a loss."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 300, (ROWS, LENGTH)).astype(np.int32)
    index, cut, end = np.arange(LENGTH), random.integers(5, 20, (ROWS, 1)), random.integers(22, LENGTH, (ROWS, 1))
    segments = np.where(index < cut, 1, np.where(index < end, 2, 0)).astype(np.int32)
    positions = np.where(segments == 2, index - cut, np.where(segments == 1, index, 0)).astype(np.int32)
    weights = (random.integers(0, 4, tokens.shape) > 0) * (segments > 0).astype(np.float32)
    arrays = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "positions": positions}
    arrays |= {"segments": segments, "weights": weights.astype(np.float32)}
    return {name: jax.device_put(x, sharder.sharding(("act_batch", None))) for name, x in arrays.items()}


# Fresh states as NumPy arrays, by the shapes of their arrays: a mesh changes none of them.
CREATED: dict[str, TrainState] = {}


def create(states: StateFactory) -> TrainState:
    shapes = str([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(states.abstract())])
    if shapes not in CREATED:
        CREATED[shapes] = jax.device_get(states.create(0))
    return CREATED[shapes]


def initial(states: StateFactory) -> TrainState:
    """A state in which some units of the last layer's MLP are dead, and all parameters are nonzero otherwise."""
    state = create(states)
    params = jax.tree.map(lambda x: np.asarray(x) if x.ndim > 2 else np.asarray(x) + 0.01, state.params)
    up = params["pattern"]["0"].get("mlp", {}).get("up", {})
    if "kernel" in up:
        up["kernel"] = up["kernel"].copy()
        up["kernel"][1, :, :DEAD] = 0
    return jax.device_put(dataclasses.replace(state, params=params), states.shardings())


def record(states: StateFactory, config: Config) -> tuple[dict[str, float], TrainState]:
    """Statistics of one step, and the state after it."""
    loss, example = next_token_loss(states.model, states.sharder, config.train), batch(states.sharder)
    step = trace_step(states, loss, config.train, example, has_statistics=True).lower().compile()
    state, metrics = step(initial(states), example)
    return flatten(jax.device_get(metrics[STATISTICS]), config.model), state


@cache
def recorded() -> tuple[dict[str, float], TrainState, StateFactory, Config]:
    states, config = plan()
    return *record(states, config), states, config


def layer_of(tree: Any, part: str, index: int) -> np.ndarray:
    return np.concatenate([np.asarray(x)[index].ravel() for x in jax.tree.leaves(tree["pattern"]["0"][part])])


@pytest.mark.slow
def test_parameters_gradients_and_updates() -> None:
    values, after, states, config = recorded()
    before, data = initial(states), batch(states.sharder)
    loss = next_token_loss(states.model, states.sharder, config.train)

    def mean(params: Any) -> jax.Array:
        sums = loss(params, data, None)
        return sums["loss"] / sums["weight"]

    trees = {"weight": before.params, "grad": jax.jit(jax.grad(mean))(before.params)}
    trees["update"] = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), after.params, before.params)
    for name, tree in trees.items():
        for part in ("attention", "mlp"):
            for layer in range(LAYERS):
                flat = layer_of(tree, part, layer)
                expected = {f"{name}_norm": np.linalg.norm(flat), f"{name}_max": np.abs(flat).max()}
                for statistic, value in expected.items():
                    assert values[f"{statistic}/{part}/{layer}"] == pytest.approx(value, rel=2e-3), (statistic, part)
        table = np.asarray(tree["embedding"]["table"])
        assert values[f"{name}_norm/embedding"] == pytest.approx(np.linalg.norm(table), rel=2e-3)
        norms = [np.asarray(tree["pattern"]["0"][norm]["scale"])[1] for norm in ("attention_norm", "mlp_norm")]
        assert values[f"{name}_norm/norm/1"] == pytest.approx(np.linalg.norm(norms), rel=2e-3)


@pytest.mark.slow
def test_logits_of_evenly_spaced_queries_of_a_long_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_statistics, "QUERIES", 8)
    rng = np.random.default_rng(0)
    q_BTNH, k_BSKH = rng.normal(size=(2, 32, 4, 8)), rng.normal(size=(2, 32, 2, 8))
    context: Any = SimpleNamespace(has_statistics=True, is_real_BT=jnp.ones((2, 32), bool))
    arrays = (jnp.asarray(x, jnp.float32) for x in (q_BTNH, k_BSKH))
    request = Request(scale=0.5, causal=True, window=None, chunk=None, softcap=None, softmax_dtype="float32")
    found = layer_statistics.logit_statistics(*arrays, request, context, segments_BT=None)
    logits_BNTS = 0.5 * np.einsum("btnh,bsnh->bnts", q_BTNH, np.repeat(k_BSKH, 2, axis=2))
    expected = np.where(np.tri(32, dtype=bool), logits_BNTS, -np.inf)[:, :, 3::4].max()
    np.testing.assert_allclose(found["logit_max"], expected, rtol=1e-5)


@pytest.mark.slow
def test_activations_logits_and_dead_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against arrays that are captured while the layers run one by one, without jit."""
    values, _, states, _ = recorded()
    params, data, captured = initial(states).params, batch(states.sharder), []
    attend, gated = attention.attend, mlp.gated

    def capture_attention(q: jax.Array, k: jax.Array, v: jax.Array, request: Any, *rest: Any, **more: Any) -> jax.Array:
        captured.append(("attention", np.asarray(q, np.float32), np.asarray(k, np.float32), request.scale))
        return attend(q, k, v, request, *rest, **more)

    def capture_units(activation: Any, gate: jax.Array, up: jax.Array) -> jax.Array:
        captured.append(("units", np.asarray(gated(activation, gate, up), np.float32)))
        return gated(activation, gate, up)

    monkeypatch.setattr(attention, "attend", capture_attention)
    monkeypatch.setattr(mlp, "gated", capture_units)
    with jax.disable_jit():
        forward = states.model.forward(
            params, data["tokens"], Context.of_batch(data, states.sharder, None), keep_layers=True
        )
    segments = np.asarray(data["segments"])
    real = segments > 0
    for layer, stream in enumerate(forward.layer_outputs):
        rows = np.asarray(stream, np.float32)[real]
        assert values[f"activation_rms/stream/{layer}"] == pytest.approx(np.sqrt(np.mean(rows**2)), rel=1e-2)
        assert values[f"activation_max/stream/{layer}"] == pytest.approx(np.abs(rows).max(), rel=1e-2)
    index = np.arange(LENGTH)
    mask = (segments[:, :, None] == segments[:, None]) & real[:, :, None] & (index[:, None] >= index)
    for layer, (_, q, k, scale) in enumerate(item for item in captured if item[0] == "attention"):
        logits = scale * np.einsum("btnh,bsnh->bnts", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2))
        largest = logits[np.broadcast_to(mask[:, None], logits.shape)].max()
        assert values[f"logit_max/attention/{layer}"] == pytest.approx(largest, rel=1e-2)
    for layer, (_, units) in enumerate(item for item in captured if item[0] == "units"):
        largest = np.abs(units[real]).max(axis=0)
        assert values[f"dead_units/mlp/{layer}"] == pytest.approx(np.mean(largest < 0.01 * np.median(largest)))
    assert values["dead_units/mlp/1"] == pytest.approx(DEAD / UNITS)


@pytest.mark.slow
def test_loss_by_position() -> None:
    values, _, states, _ = recorded()
    params, data = initial(states).params, batch(states.sharder)
    forward = states.model.forward(params, data["tokens"], Context.of_batch(data, states.sharder, None))
    logits = np.asarray(states.model.logits(params, forward.hidden_BTD, states.sharder), np.float64)
    nll = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.asarray(data["targets"])[..., None], -1)[..., 0]
    )
    positions, weights = np.asarray(data["positions"]), np.asarray(data["weights"])
    for first in (0, 1, 3, 7, 15):
        inside = (positions >= first) & (positions <= 2 * first) * (weights > 0)
        assert values[f"loss/position/{first}"] == pytest.approx(np.average(nll[inside]), rel=1e-3), first
    assert "loss/position/31" not in values


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "axes"),
    [(["train.grad_accum=2", "train.per_device_batch_size=4"], {}), ([], {"fsdp": 4}), ([], {"stage": 2})],
    ids=["microbatches", "mesh", "stages"],
)
def test_microbatches_meshes_and_stages_record_the_same(overrides: list[str], axes: dict[str, int]) -> None:
    expected, *_ = recorded()
    states, config = plan(*overrides, **axes)
    values, _ = record(states, config)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=0.05, abs=2e-4), name


@pytest.mark.slow
def test_the_step_with_statistics_takes_the_same_update() -> None:
    _, after, states, config = recorded()
    loss, example = next_token_loss(states.model, states.sharder, config.train), batch(states.sharder)
    plain, metrics = trace_step(states, loss, config.train, example).lower().compile()(initial(states), example)
    assert STATISTICS not in metrics
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain.params, after.params)


@pytest.mark.exhaustive
def test_adapters_and_experts() -> None:
    states, config = plan("adapter=lora", "adapter.rank=2")
    values, _ = record(states, config)
    assert {"grad_norm/attention/1", "activation_rms/stream/1"} <= values.keys() and "grad_norm/norm/1" not in values
    experts = ["model.kinds.layer.feed_forward=moe", "model.kinds.layer.moe.experts=4", "model.kinds.layer.moe.top_k=2"]
    states, config = plan(*experts)
    values, _ = record(states, config)
    assert values["expert_load_min/mlp/1"] <= 1 <= values["expert_load_max/mlp/1"] <= 2
    assert 0 <= values["dead_experts/mlp/0"] <= 0.5 and "dead_units/mlp/0" not in values


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantization", ["fp8", "fp8_delayed"])
def test_quantized_training(quantization: str) -> None:
    states, config = plan(f"quantization={quantization}", "train.grad_accum=2", "train.per_device_batch_size=4")
    values, _ = record(states, config)
    expected, *_ = recorded()
    assert values.keys() == expected.keys()
    assert values["grad_norm/mlp/1"] == pytest.approx(expected["grad_norm/mlp/1"], rel=0.3)
