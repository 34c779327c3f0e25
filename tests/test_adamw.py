"""AdamW in one pass, against optax: values after several steps, steps that do not count, and whole states of a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.optimizer import Optimizer as Config
from maxhydra.config.optimizer import OptimizerKind, Schedule, ScheduleKind, UpdateBackend
from maxhydra.config.run import Nonfinite, Train
from maxhydra.kernels.adamw import BACKENDS, Call, Held, Now, Rule, reference, triton
from maxhydra.kernels.place import Place
from maxhydra.optim import Optimizer, build
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step

RULE = Rule(b1=0.9, b2=0.95, eps=1e-8, decay=0.1)
RATE, SCALE, STEPS = 1e-2, 0.5, 3


def numbers(step: int, apply: bool = True) -> Now:
    values = (SCALE, RATE, 1 / (1 - RULE.b1 ** (step + 1)), 1 / (1 - RULE.b2 ** (step + 1)), apply)
    return Now(*(jnp.float32(value) for value in values))


def gradients(step: int, parts: int, shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    random = np.random.default_rng(step)
    return [jnp.asarray(random.standard_normal(shape), dtype) for _ in range(parts)]


@pytest.mark.parametrize("run", [reference.adamw, lambda *given: triton.adamw(*given, interpret=True)])
@pytest.mark.parametrize(("shape", "parts", "dtype"), [((3, 16, 32), 3, "bfloat16"), ((8, 96), 1, "float32")])
def test_steps_are_those_of_optax(run, shape: tuple[int, ...], parts: int, dtype: str) -> None:
    transform = optax.adamw(RATE, b1=RULE.b1, b2=RULE.b2, eps=RULE.eps, weight_decay=RULE.decay)
    weight = jnp.asarray(np.random.default_rng(9).standard_normal(shape), jnp.float32)
    held = Held(weight, jnp.zeros(shape), jnp.zeros(shape))
    state = transform.init(weight)
    update = jax.jit(run, static_argnums=3)
    for step in range(STEPS):
        grads = gradients(step, parts, shape[1:] if parts > 1 else shape, dtype)
        held = update(held, grads, numbers(step), RULE)
        same = update(held, grads, numbers(step, apply=False), RULE)
        assert all(np.array_equal(a, b) for a, b in zip(same, held, strict=True))
        wide = SCALE * jnp.stack(grads).reshape(shape).astype(jnp.float32)
        updates, state = transform.update(wide, state, weight)
        weight = optax.apply_updates(weight, updates)
    for found, wanted in zip(held, (weight, state[0].mu, state[0].nu), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"devices": 4}, "runs on 1 device, not 4"),
        ({"size": 3072}, "takes weights of 1048576 to 2147483647 numbers, not 3072"),
        ({"size": 3 * 1000 * 1000}, "takes parts in multiples of 256 numbers, not 1000000"),
    ],
)
def test_what_the_kernel_takes(given: dict, reason: str | None) -> None:
    call = Call(**{"platform": "gpu", "devices": 1, "dtype": "float32", "size": 3 * 2**20, "parts": 3, **given})
    assert BACKENDS["triton"].refusals(call) == (() if reason is None else (reason,))


AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "layers": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "norm": ("layers", "norm")},
}
SIZES = {"vocab": 1024, "embed": 1024, "layers": 2, "mlp": 512, "norm": 1024}
SHAPES = {
    group: {
        name: jax.ShapeDtypeStruct(tuple(SIZES[axis] for axis in axes), jnp.float32) for name, axes in arrays.items()
    }
    for group, arrays in AXES.items()
}


def optimizer(backend: UpdateBackend, *, platform: str = "gpu", **fields) -> Optimizer:
    schedule = Schedule(kind=ScheduleKind.linear, warmup_steps=1, final_fraction=0.1)
    given = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "clip_norm": 0.5, "schedule": schedule, "learning_rate": RATE}
    place = Place(platform, None, None, None, None)
    config = Config(backend=backend, **given, **fields)
    return build(config, steps=4, shapes=SHAPES, axes=AXES, is_written_out=True, place=place)


def after_steps(own: Optimizer) -> tuple[TrainState, list[dict]]:
    """A state after four steps, of which one does not count; a weight's gradient is the batch's array for it."""

    def loss(params: dict, batch: dict, key: jax.Array | None) -> dict:
        total = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True))
        return {"loss": total, "weight": jnp.float32(3), "nll": total}

    random = np.random.default_rng(0)
    draw = lambda: jax.tree.map(lambda s: np.asarray(random.standard_normal(s.shape), np.float32), SHAPES)  # noqa: E731
    params = draw()
    key = jax.random.key_data(jax.random.key(1))
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, own.transform.init(params), key, Guard.fresh())
    step = jax.jit(make_step(loss, own, Train(on_nonfinite=Nonfinite.skip)))
    metrics = []
    for number in range(4):
        batch = draw()
        batch["layers"]["norm"][0, 0] = np.nan if number == 1 else 0
        state, of_step = step(state, batch)
        metrics.append(of_step)
    return state, metrics


def test_a_run_is_the_same_with_weights_updated_in_place() -> None:
    """With the reference in the kernel's stead: clipping, decay, learning rate, a step that is skipped, what is frozen
    and what is too small, and the same tree for a checkpoint."""
    fields = {"trainable": ["embedding", "layers/(up|norm)"], "no_decay": ["norm", "up"]}
    kernel = optimizer(UpdateBackend.triton, **fields)
    assert [jax.tree_util.keystr(keys, simple=True, separator="/") for keys in kernel.in_place.leaves] == [
        "embedding/table",
        "layers/up",
    ]
    assert [leaf.parts for leaf in kernel.in_place.leaves.values()] == [1, 2]
    checked = dataclasses.replace(kernel, in_place=dataclasses.replace(kernel.in_place, backend="reference"))
    found, told = after_steps(checked)
    wanted, expected = after_steps(optimizer(UpdateBackend.xla, **fields))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), told, expected)
    assert [int(m["skipped"]) for m in told] == [0, 1, 1, 1]


def test_the_kernel_where_it_cannot_run() -> None:
    assert not optimizer(UpdateBackend.auto, platform="cpu").in_place.leaves
    with pytest.raises(ConfigError, match=r"optimizer\.backend.*runs on gpu, not cpu"):
        optimizer(UpdateBackend.triton, platform="cpu")
    problems = [problem.path for problem in Config(kind=OptimizerKind.lion, backend=UpdateBackend.triton).check()]
    assert "backend" in problems
