"""Load balancing of experts in training: by a router bias that gets no gradient, and by an auxiliary loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config.schema import model as config
from maxhydra.config.schema.optimizer import Optimizer as OptimizerConfig
from maxhydra.config.schema.optimizer import OptimizerKind, Schedule, ScheduleKind
from maxhydra.config.schema.run import Train
from maxhydra.model import ModelDef, build
from maxhydra.optim import Optimizer
from maxhydra.optim import build as build_optimizer
from maxhydra.sharding import Sharder
from maxhydra.train import held_out_loss, next_token_loss
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step

Step = Callable[..., Any]
EXPERTS, VOCAB, RATE = 8, 64, 0.005
OPTIMIZER = Optimizer(transform=optax.adamw(1e-3, weight_decay=0.1), schedule=lambda step: 1e-3)


def model_of(moe: config.Moe) -> ModelDef:
    sizes = {"num_layers": 1, "emb_dim": 16, "mlp_dim": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    kind = config.Kind(feed_forward=config.FeedForward.moe, moe=moe)
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    return build(config.Model(**sizes, vocab_size=VOCAB, context_length=64, kinds={"layer": kind}, dtypes=dtypes))


def started(model: ModelDef) -> TrainState:
    """Weights with which most tokens prefer the same two experts, by a component that all tokens share."""
    params = model.init(jax.random.key(0))
    router = params["pattern"]["0"]["mlp"]["router"]
    params["embedding"]["table"] = params["embedding"]["table"].at[:, 0].add(2.0)
    router["kernel"] = router["kernel"].at[:, 0, :2].add(0.7)
    key = jax.random.key_data(jax.random.key(1))
    opt_state = OPTIMIZER.transform.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, {}, opt_state, key, Guard.fresh())


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """16 rows of 32 tokens, of which the last quarter is padding in every second row."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (16, 33)).astype(np.int32)
    segments = np.ones((16, 32), np.int32)
    segments[::2, 24:] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(32, dtype=np.int32), (16, 32)),
        "segments": segments,
        "weights": segments.astype(np.float32),
    }


def step_of(model: ModelDef, micro_batches: int = 1) -> Step:
    train = Train(grad_accum=micro_batches)
    return jax.jit(
        make_step(next_token_loss(model, Sharder.single(), train), OPTIMIZER, train, model.apply_aux_updates)
    )


def trained(model: ModelDef, step: Step, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
    state, seen = started(model), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


@pytest.fixture(scope="module")
def whole() -> Step:
    """The step of BIASED, compiled once."""
    return step_of(BIASED)


def correction(state: TrainState) -> np.ndarray:
    return np.array(state.params["pattern"]["0"]["mlp"]["router"]["correction"])


ROUTER = config.Router(scores=config.RouterScores.sigmoid, bias_rate=RATE)
BIASED = model_of(config.Moe(experts=EXPERTS, top_k=2, dim=8, router=ROUTER))


@pytest.mark.exhaustive
def test_bias_reduces_the_largest_load_from_three_times_the_mean_to_1_1(whole):
    _, seen = trained(BIASED, whole, 90)
    loads = [row["moe/load_max_mean"] for row in seen]
    assert loads[0] > 3
    assert np.mean(loads[-5:]) < 1.1


@pytest.mark.slow
def test_bias_moves_by_its_rate_once_per_step(whole):
    """In whole multiples of the rate, without decay or gradient, by the load of all microbatches together."""
    moved, in_parts = (correction(trained(BIASED, step, 3)[0]) for step in (whole, step_of(BIASED, 2)))
    np.testing.assert_allclose(moved / RATE, np.round(moved / RATE), atol=1e-4)
    assert np.any(moved < 0) and np.any(moved > 0)
    np.testing.assert_array_equal(in_parts, moved)


@pytest.mark.slow
def test_bias_of_a_frozen_router_does_not_change():
    shapes, axes = BIASED.shapes, BIASED.axes
    fields = {"kind": OptimizerKind.adamw, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "trainable": ["attention"]}
    schedule = Schedule(kind=ScheduleKind.constant)
    optimizer = build_optimizer(OptimizerConfig(**fields, schedule=schedule), steps=2, shapes=shapes, axes=axes)
    state, loss = started(BIASED), next_token_loss(BIASED, Sharder.single(), Train())
    state = dataclasses.replace(state, opt_state=optimizer.transform.init(state.params))
    moved = jax.jit(make_step(loss, optimizer, Train(), BIASED.apply_aux_updates))(state, batch())[0]
    layer, before = (one.params["pattern"]["0"] for one in (moved, state))
    jax.tree.map(np.testing.assert_array_equal, layer["mlp"], before["mlp"])
    assert np.any(layer["attention"]["out"]["kernel"] != before["attention"]["out"]["kernel"])


@pytest.mark.exhaustive
def test_padding_is_not_counted_in_unpacked_rows():
    """Rows of packing=none, preference pairs and completions mark padding by positions only."""
    model = model_of(config.Moe(experts=EXPERTS, top_k=2, dim=8, router=ROUTER, balance_weight=0.5))
    marked, step = batch(), step_of(model)
    alone = {name: column for name, column in marked.items() if name != "segments"}
    alone["positions"] = np.where(marked["segments"], marked["positions"], 0)
    (state, metrics), (expected, expected_metrics) = (step(started(model), given) for given in (alone, marked))
    for name in ("loss", "side_loss", "moe/load_max_mean", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(expected_metrics[name]), rel=1e-5), name
    np.testing.assert_array_equal(correction(state), correction(expected))


@pytest.mark.exhaustive
def test_balance_loss_is_part_of_training_only():
    """With an even load it is 1 in the single layer; evaluation reports the loss without it."""
    model = model_of(config.Moe(experts=EXPERTS, top_k=2, dim=8, balance_weight=0.5))
    _, seen = trained(model, step_of(model), 30)
    assert seen[0]["side_loss"] > 0.5 * 1.5
    assert seen[-1]["side_loss"] - 0.5 < 0.7 * (seen[0]["side_loss"] - 0.5)
    assert seen[-1]["moe/load_max_mean"] < seen[0]["moe/load_max_mean"]

    loss = next_token_loss(model, Sharder.single(), Train())
    evaluate = held_out_loss(loss, lambda: iter([batch()]), limit=1, parts=1)
    measured = evaluate(started(model))
    assert measured["eval/loss"] == pytest.approx(seen[0]["loss"] - seen[0]["side_loss"], rel=1e-5)
    assert not any("side" in name or "told" in name for name in measured)
