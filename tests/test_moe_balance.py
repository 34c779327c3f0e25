"""An even load on experts, in training: by a bias that no gradient moves, and by a loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config import model as config
from maxhydra.config.run import Train
from maxhydra.model import ModelDef, build
from maxhydra.optim import Optimizer
from maxhydra.sharding import Sharder
from maxhydra.train.objective import held_out_loss, next_token_loss
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step

EXPERTS, VOCAB, RATE = 8, 32, 0.02
OPTIMIZER = Optimizer(transform=optax.adamw(1e-3, weight_decay=0.1), schedule=lambda step: 1e-3)


def model_of(moe: config.Moe) -> ModelDef:
    sizes = {"num_layers": 2, "emb_dim": 16, "mlp_dim": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    kind = config.Kind(feed_forward=config.FeedForward.moe, moe=moe)
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    return build(config.Model(**sizes, vocab_size=VOCAB, context_length=64, kinds={"layer": kind}, dtypes=dtypes))


def started(model: ModelDef) -> TrainState:
    """Where every token likes the same two experts: half of what they get lies in one direction of the stream."""
    params = model.init(jax.random.key(0))
    router = params["pattern"]["0"]["mlp"]["router"]
    params["embedding"]["table"] = params["embedding"]["table"].at[:, 0].add(2.0)
    router["kernel"] = router["kernel"].at[:, 0, :2].add(1.0)
    key = jax.random.key_data(jax.random.key(1))
    opt_state = OPTIMIZER.transform.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, {}, opt_state, key, Guard.fresh())


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Eight rows of 32 tokens, of which the last quarter of every row is padding."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (8, 33)).astype(np.int32)
    segments = np.broadcast_to(np.arange(32) < 24, (8, 32)).astype(np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), (8, 32))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": positions,
        "segments": segments,
        "weights": segments.astype(np.float32),
    }


def trained(model: ModelDef, steps: int, **train: int) -> tuple[TrainState, list[dict[str, float]]]:
    train = Train(**train)
    step = jax.jit(make_step(next_token_loss(model, Sharder.single(), train), OPTIMIZER, train, model.settled))
    state, seen = started(model), []
    for number in range(steps):
        state, metrics = step(state, batch_of(number))
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


def correction(state: TrainState) -> np.ndarray:
    return np.array(state.params["pattern"]["0"]["mlp"]["router"]["correction"])


def biased(rate: float | None) -> ModelDef:
    scores = config.RouterScores.sigmoid
    return model_of(config.Moe(experts=EXPERTS, top_k=2, dim=8, router=config.Router(scores=scores, bias_rate=rate)))


def test_a_bias_brings_the_load_from_over_three_times_the_mean_to_a_tenth_over_it():
    state, seen = trained(biased(RATE), 120)
    loads = [row["moe/load_max_mean"] for row in seen]
    assert loads[0] > 3
    assert np.mean(loads[-10:]) < 1.1
    assert np.abs(correction(state)).max() <= 120 * RATE + 1e-6


def test_the_bias_moves_by_its_rate_alone_and_micro_batches_move_it_once():
    """Whole multiples of the rate: no decay, no gradient. The load of all micro-batches counts, not of each."""
    whole, _ = trained(biased(RATE), 3)
    cut, _ = trained(biased(RATE), 3, grad_accum=2)
    multiples = correction(whole) / RATE
    np.testing.assert_allclose(multiples, np.round(multiples), atol=1e-4)
    assert np.any(multiples != 0)
    np.testing.assert_array_equal(correction(cut), correction(whole))
    still, _ = trained(biased(0.0), 3)
    np.testing.assert_array_equal(correction(still), 0)


def test_the_balance_loss_is_trained_on_and_not_evaluated():
    moe = config.Moe(experts=EXPERTS, top_k=2, dim=8)
    weighted, plain = model_of(dataclasses.replace(moe, balance_weight=0.5)), model_of(moe)
    states = {name: trained(model, 30) for name, model in (("weighted", weighted), ("plain", plain))}
    last = {name: seen[-1]["moe/load_max_mean"] for name, (_, seen) in states.items()}
    assert last["weighted"] < 0.8 * last["plain"]
    first = {name: seen[0] for name, (_, seen) in states.items()}
    added = first["weighted"]["loss"] - first["plain"]["loss"]
    assert added == pytest.approx(first["weighted"]["side_loss"], rel=1e-4)
    assert added > 2 * 0.5

    state, losses = states["plain"][0], []
    for model in (weighted, plain):
        evaluate = held_out_loss(
            next_token_loss(model, Sharder.single(), Train()), lambda: iter([batch_of(0)]), limit=1
        )
        losses.append(evaluate(state))
    assert losses[0] == losses[1]
