"""Averages of the weights, against optax and a NumPy transcription."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from maxhydra.config.schema.optimizer import Optimizer as Config
from maxhydra.config.schema.optimizer import OptimizerKind, Schedule, ScheduleKind
from maxhydra.optim import build, exchange, state_axes
from maxhydra.sharding import is_axes

PARAMS = {"layer": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4)}, "norm": {"scale": jnp.ones(4)}}
AXES = {"layer": {"kernel": ("embed", "mlp")}, "norm": {"scale": ("norm",)}}
STEPS = 6


def build_optimizer(**fields):
    common = {"learning_rate": 0.05, "clip_norm": None, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
    schedule = Schedule(kind=ScheduleKind.constant, warmup_steps=2)
    config = Config(**{**common, "schedule": schedule, **fields})
    return build(config, steps=STEPS, shapes=jax.eval_shape(lambda: PARAMS), axes=AXES)


def gradients(step):
    random = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(random.standard_normal(p.shape), jnp.float32), PARAMS)


def run(transform):
    params, state, seen = PARAMS, transform.init(PARAMS), []
    for step in range(STEPS):
        updates, state = transform.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return params, state, seen


@pytest.mark.slow
def test_schedule_free_equals_optax():
    """Weights and average after each of the steps with a warm-up, in which the weights of the average differ."""

    def rate(count):
        return 0.05 * jnp.minimum(1.0, count / 3)

    decayed = jax.tree_util.tree_map_with_path(lambda keys, _: "norm" not in str(keys), PARAMS)
    base = optax.adamw(lambda count: rate(count + 1), b1=0.0, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed)
    reference = optax.contrib.schedule_free(base, rate, b1=0.9)
    expected, state, _ = run(reference)
    averaged = optax.contrib.schedule_free_eval_params(state, expected)
    params, own, _ = run(build_optimizer(kind=OptimizerKind.schedule_free).transform)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), own.average.params, averaged)


def test_ema_is_the_transcription_and_changes_no_update():
    params, state, seen = run(build_optimizer(ema_decay=0.3).transform)
    plain, _, _ = run(build_optimizer().transform)
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    average = np.asarray(PARAMS["layer"]["kernel"], np.float64)
    for step, weights in enumerate(seen):
        decay = min(0.3, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * np.asarray(weights["layer"]["kernel"])
    np.testing.assert_allclose(state.average.params["layer"]["kernel"], average, rtol=1e-5)


@pytest.mark.parametrize("fields", [{"ema_decay": 0.9}, {"kind": OptimizerKind.schedule_free}])
def test_frozen_weights_have_no_average(fields):
    optimizer = build_optimizer(trainable=["layer"], **fields)
    params, state, _ = run(optimizer.transform)
    np.testing.assert_array_equal(params["norm"]["scale"], PARAMS["norm"]["scale"])
    assert len(jax.tree.leaves(state.average.params)) == 1
    weights, average = exchange(state.average, params)
    np.testing.assert_array_equal(weights["layer"]["kernel"], state.average.params["layer"]["kernel"])
    np.testing.assert_array_equal(weights["norm"]["scale"], params["norm"]["scale"])
    again, _ = exchange(average, weights)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    axes = state_axes(optimizer, jax.eval_shape(lambda: PARAMS), AXES)
    assert axes.average.params["layer"]["kernel"] == ("embed", "mlp")
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(state)
