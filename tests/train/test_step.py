"""The training step on a small linear model: micro-batches, the guard, and updates that are skipped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config.schema.run import Nonfinite, Spike, Train
from maxhydra.optim import Optimizer
from maxhydra.train.compile import CheckedStep, StepCheckError, add_checks
from maxhydra.train.evaluate import held_out_loss
from maxhydra.train.loss import LossFn
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step

OPTIMIZER = Optimizer(transform=optax.adam(0.1), schedule=lambda step: 0.1 / (step + 1))


def loss(params: dict, batch: dict, key: jax.Array | None) -> dict:
    error = jnp.square(batch["x"] @ params["w"] - batch["y"]) * batch["weights"]
    return {"loss": error.sum(), "weight": batch["weights"].sum(), "nll": error.sum()}


def fresh(seed: int = 0) -> TrainState:
    params = {"w": jax.random.normal(jax.random.key(seed), (4,))}
    key = jax.random.key_data(jax.random.key(1))
    return TrainState(jnp.zeros((), jnp.int32), params, {}, OPTIMIZER.transform.init(params), key, Guard.fresh())


def batch(seed: int, scale: float = 1.0) -> dict:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, 4)).astype(np.float32)
    weights = rng.integers(0, 2, 12).astype(np.float32)
    return {"x": x, "y": (scale * x.sum(-1)).astype(np.float32), "weights": weights}


@pytest.mark.slow
def test_one_step_is_optax() -> None:
    state, data = fresh(), batch(0)
    grads = jax.grad(lambda p: loss(p, data, None)["loss"] / data["weights"].sum())(state.params)
    updates, _ = OPTIMIZER.transform.update(grads, state.opt_state, state.params)
    new, metrics = jax.jit(make_step(loss, OPTIMIZER, Train()))(state, data)
    np.testing.assert_allclose(new.params["w"], optax.apply_updates(state.params, updates)["w"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grads["w"]), rtol=1e-6)
    np.testing.assert_allclose(metrics["learning_rate"], 0.1)
    assert new.step == 1


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_micro_batches_equal_the_big_batch(micro_batches: int) -> None:
    """Also if the micro-batches have different numbers of tokens."""
    whole, split = fresh(), fresh()
    step = jax.jit(make_step(loss, OPTIMIZER, Train()))
    split_step = jax.jit(make_step(loss, OPTIMIZER, Train(grad_accum=micro_batches)))
    for i in range(5):
        whole, of_whole = step(whole, batch(i))
        split, of_split = split_step(split, batch(i))
        np.testing.assert_allclose(of_split["loss"], of_whole["loss"], rtol=1e-5)
    np.testing.assert_allclose(split.params["w"], whole.params["w"], rtol=1e-5)


def test_an_evaluation_uses_the_micro_batches_of_a_step() -> None:
    sizes = []

    def recording_loss(params: dict, batch: dict, key: jax.Array | None) -> dict:
        sizes.append(len(batch["x"]))
        return loss(params, batch, key)

    means = [
        held_out_loss(recording_loss, lambda: map(batch, range(3)), limit=2, parts=parts)(fresh())  # type: ignore[misc]
        for parts in (1, 3)
    ]
    assert set(sizes) == {12, 4}
    assert means[1] == pytest.approx(means[0], rel=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_stop_on_nonfinite_is_sticky(poison: float) -> None:
    step = jax.jit(make_step(loss, OPTIMIZER, Train(on_nonfinite=Nonfinite.stop)))
    before, _ = step(fresh(), batch(0))
    state, metrics = step(
        before, {**batch(1), "weights": np.ones(12, np.float32), "y": np.full(12, poison, np.float32)}
    )
    assert metrics["halted"]
    state, metrics = step(state, batch(2))
    assert metrics["halted"]
    assert all(
        jax.tree.map(np.array_equal, [state.params, state.opt_state], [before.params, before.opt_state])[0].values()
    )
    assert state.step == before.step == 1


def test_skip_on_nonfinite_continues() -> None:
    step = jax.jit(make_step(loss, OPTIMIZER, Train(on_nonfinite=Nonfinite.skip)))
    before, _ = step(fresh(), batch(0))
    bad, metrics = step(before, {**batch(1), "weights": np.ones(12, np.float32), "y": np.full(12, np.nan, np.float32)})
    assert not metrics["halted"] and metrics["skipped"] == 1
    np.testing.assert_array_equal(bad.params["w"], before.params["w"])
    after, _ = step(bad, batch(2))
    expected, _ = step(before, batch(2))
    np.testing.assert_array_equal(after.params["w"], expected.params["w"])
    assert after.step == 3


def test_a_spike_is_skipped_after_warmup() -> None:
    train = Train(spike=Spike(sigmas=6.0, warmup_steps=5, decay=0.9))
    step = jax.jit(make_step(loss, OPTIMIZER, train))
    state = fresh()
    for i in range(10):
        state, metrics = step(state, batch(i))
    assert metrics["skipped"] == 0
    after, metrics = step(state, batch(10, scale=1000.0))
    assert metrics["skipped"] == 1
    np.testing.assert_array_equal(after.params["w"], state.params["w"])
    _, metrics = step(fresh(), batch(10, scale=1000.0))
    assert metrics["skipped"] == 0


def test_a_sustained_jump_is_accepted_after_a_while() -> None:
    """When the data changes and the loss stays higher, the run resumes learning."""
    step = jax.jit(make_step(loss, OPTIMIZER, Train(spike=Spike(sigmas=4.0, warmup_steps=5))))
    state = fresh()
    for i in range(20):
        state, _ = step(state, batch(i))
    skipped = []
    for i in range(20, 100):
        state, metrics = step(state, batch(i, scale=30.0))
        skipped.append(int(metrics["skipped"]))
    assert 1 <= skipped[-1] < 50
    assert skipped[-1] == skipped[-20]


def test_guard_follows_mean_and_variance() -> None:
    """Over the first steps the guard's statistics are the plain mean and variance of loss and gradient norm."""
    step = jax.jit(make_step(loss, OPTIMIZER, Train(spike=Spike(sigmas=100.0, decay=0.999))))
    state, observed = fresh(), []
    for i in range(8):
        state, metrics = step(state, batch(i))
        observed.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(state.guard.mean, np.mean(observed, 0), rtol=1e-4)
    np.testing.assert_allclose(state.guard.variance, np.var(observed, 0), rtol=1e-3)


def test_state_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fresh().step = 3  # type: ignore[misc]


def _log_of_negative(params: dict, batch: dict, key: jax.Array | None) -> dict:
    sums = loss(params, batch, key)
    return {**sums, "loss": sums["loss"] + jnp.log(-1.0 - jnp.square(params["w"][0]))}


def _division_by_zero(params: dict, batch: dict, key: jax.Array | None) -> dict:
    sums = loss(params, batch, key)
    return {**sums, "loss": sums["loss"] / (0 * sums["weight"])}


def _index_out_of_bounds(params: dict, batch: dict, key: jax.Array | None) -> dict:
    sums = loss(params, batch, key)
    return {**sums, "loss": sums["loss"] + params["w"][jnp.int32(sums["weight"]) + 4]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "broken", "message"),
    [
        ("nan", _log_of_negative, "nan generated by primitive: log, in "),
        ("div", _division_by_zero, "division by zero, in "),
        ("index", _index_out_of_bounds, "out-of-bounds indexing for array of shape (4,)"),
    ],
)
def test_a_failed_check_names_operation_and_line(kind: str, broken: LossFn, message: str) -> None:
    correct = CheckedStep(jax.jit(add_checks(make_step(loss, OPTIMIZER, Train()), ["index", "nan", "div"])))
    state, _ = correct(fresh(), batch(0))
    expected, _ = jax.jit(make_step(loss, OPTIMIZER, Train()))(fresh(), batch(0))
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-6)
    step = CheckedStep(jax.jit(add_checks(make_step(broken, OPTIMIZER, Train()), [kind])))
    with pytest.raises(StepCheckError) as error:
        step(fresh(), batch(0))
    line = broken.__code__.co_firstlineno + 2
    assert message in str(error.value) and f"{__file__}:{line} ({broken.__name__})" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_rounded_to_their_dtype(micro_batches: int) -> None:
    """Each micro-batch adds to a bfloat16 sum, which the optimizer reads."""
    seen = []

    def record(updates: optax.Updates, params: optax.Params) -> optax.Updates:
        seen.append(updates["w"])
        return updates

    spy = Optimizer(optax.stateless(record), lambda step: 0.1, grad_dtype="bfloat16")
    state = dataclasses.replace(fresh(), opt_state=spy.transform.init(fresh().params))
    data = batch(0)
    make_step(loss, spy, Train(grad_accum=micro_batches))(state, data)
    expected = jnp.zeros(4, jnp.bfloat16)
    for part in range(micro_batches):
        rows = {name: column[part::micro_batches] for name, column in data.items()}
        expected += jax.grad(lambda p, rows=rows: loss(p, rows, None)["loss"])(state.params)["w"].astype(jnp.bfloat16)
    np.testing.assert_allclose(seen[0], expected.astype(np.float32) / data["weights"].sum(), rtol=1e-6)
