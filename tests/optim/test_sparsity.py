"""N:M sparsity against a NumPy transcription of the schedule, the masks and the straight-through update."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.schema.optimizer import Optimizer, OptimizerKind, Schedule, ScheduleKind, Sparsity
from maxhydra.optim import build, state_axes
from maxhydra.optim.sparsity import n_m_mask

CONSTANT = Schedule(kind=ScheduleKind.constant)
RATE, START, EVERY = 0.05, 2, 3
AXES = {
    "pattern": {
        "0": {
            "attention": {"out": {"kernel": ("layers", "heads", "head_dim", "embed")}},
            "mlp": {"router": {"kernel": ("layers", "embed", None)}},
            "norm": ("layers", "norm"),
        }
    }
}
SHAPES = {"pattern": {"0": {"attention": {"out": {"kernel": (2, 3, 8, 5)}}, "mlp": {"router": {"kernel": (2, 4, 4)}}}}}
SHAPES["pattern"]["0"]["norm"] = (2, 4)


def numpy_mask(weight: np.ndarray, n: int, m: int, axis: int) -> np.ndarray:
    """Group by group, with a stable sort."""
    moved = np.moveaxis(weight, axis, -1)
    mask = np.zeros(moved.shape, bool)
    for index in np.ndindex(*moved.shape[:-1]):
        for start in range(0, moved.shape[-1], m):
            best = np.argsort(-np.abs(moved[index][start : start + m]), kind="stable")[:n]
            mask[index][start + best] = True
    return np.moveaxis(mask, -1, axis)


@pytest.mark.parametrize(("n", "m", "axis"), [(2, 4, 1), (1, 2, 0), (3, 8, 2)])
def test_masks_keep_the_largest_weights_of_each_group(n: int, m: int, axis: int) -> None:
    # Small integers: many ties.
    weight = np.random.default_rng(0).integers(-3, 4, (8, 8, 8)).astype(np.float32)
    np.testing.assert_array_equal(n_m_mask(jnp.asarray(weight), n=n, m=m, axis=axis), numpy_mask(weight, n, m, axis))


@pytest.mark.slow
def test_sparse_training_matches_numpy() -> None:
    def make(shape: tuple[int, ...], seed: int) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

    is_shape = {"is_leaf": lambda node: isinstance(node, tuple)}
    params: Any = jax.tree.map(lambda shape: jnp.asarray(make(shape, 0)), SHAPES, **is_shape)
    sparsity = Sparsity(n=2, m=4, start_step=START, update_every=EVERY)
    config = Optimizer(
        kind=OptimizerKind.sgd, momentum=0.0, learning_rate=RATE, clip_norm=None, sparsity=sparsity, schedule=CONSTANT
    )
    optimizer = build(config, steps=100, shapes=params, axes=AXES)
    state = optimizer.transform.init(params)
    axes = state_axes(optimizer, params, AXES)
    assert axes.sparse.masks["pattern"]["0"]["attention"]["out"]["kernel"][1] == "heads"

    update = jax.jit(optimizer.transform.update)
    kernel = np.asarray(params["pattern"]["0"]["attention"]["out"]["kernel"])
    dense, mask, rate = kernel.copy(), np.ones(kernel.shape, bool), config.weight_decay
    for step in range(9):
        grads = jax.tree.map(lambda shape, step=step: jnp.asarray(make(shape, step + 1)), SHAPES, **is_shape)
        before = params
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        learning_rate = float(optimizer.schedule(step))
        gradient = np.asarray(grads["pattern"]["0"]["attention"]["out"]["kernel"])
        dense = dense - learning_rate * (gradient + rate * dense)
        done = step + 1
        if done >= START and (done - START) % EVERY == 0:
            mask = numpy_mask(dense, 2, 4, axis=2)
        found = params["pattern"]["0"]["attention"]["out"]["kernel"]
        np.testing.assert_allclose(found, dense * mask, atol=1e-6)
        assert np.all(np.asarray(found)[~mask] == 0)
        router, old = (tree["pattern"]["0"]["mlp"]["router"]["kernel"] for tree in (params, before))
        expected = old - learning_rate * (np.asarray(grads["pattern"]["0"]["mlp"]["router"]["kernel"]) + rate * old)
        np.testing.assert_allclose(router, expected, atol=1e-6)


def test_groups_that_do_not_divide_are_rejected() -> None:
    params = jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda node: isinstance(node, tuple))
    config = Optimizer(kind=OptimizerKind.sgd, momentum=0.0, sparsity=Sparsity(n=2, m=5), schedule=CONSTANT)
    with pytest.raises(ConfigError, match=r"optimizer\.sparsity\.m=5: does not divide the 8 inputs"):
        build(config, steps=10, shapes=params, axes=AXES)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["optimizer.sparsity.n=4"], "sparsity.n"),
        (["optimizer.sparsity.m=null"], "sparsity.m"),
        (["optimizer.ema_decay=0.9"], "sparsity.n"),
        (["adapter=lora"], "sparsity.n"),
        (["model.qk_clip=100"], "sparsity.n"),
        (["optimizer.sparsity.n=null", "optimizer.sparsity.m=null", "optimizer.sparsity.start_step=3"], "start_step"),
    ],
)
def test_unsupported_combinations_are_rejected(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        compose(["model=tiny", "optimizer.sparsity.n=2", "optimizer.sparsity.m=4", *overrides])
