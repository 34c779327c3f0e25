"""Gate, up and down in one kernel for Hopper where there is none: hopper.py runs it, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import run

from maxhydra.kernels.fused_product.mosaic import How, parts
from maxhydra.kernels.fused_product.plan import Plan

# 4 programs; more blocks than there is room for, and fewer.
TINY = Plan(M=64, D=512, F=256, groups=2, members=2, cluster=1, inputs=64, rows=2)


def draw(plan: Plan, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = ((plan.M, plan.D), (2 * plan.F, plan.D), (plan.D, plan.F))
    x, gate_up, down = (jnp.asarray(rng.normal(size=shape) / shape[1] ** 0.5, jnp.bfloat16) for shape in shapes)
    return 4 * x, gate_up, down


def expected(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> np.ndarray:
    gate, value = np.split(np.asarray(x, np.float64) @ np.asarray(gate_up, np.float64).T, 2, axis=1)
    hidden = np.asarray((gate / (1 + np.exp(-gate)) * value).astype(jnp.bfloat16), np.float64)
    return hidden @ np.asarray(down, np.float64).T


@pytest.mark.parametrize(
    ("changes", "seed"),
    [({}, 0), ({"M": 24, "D": 128, "rows": 3}, 1), ({"cluster": 2}, 2), ({"groups": 1, "members": 4, "cluster": 2}, 3)],
)
def test_it_is_numpys_whoever_comes_first(changes, seed):
    plan = dataclasses.replace(TINY, **changes)
    x, gate_up, down = draw(plan, seed)
    found = run(lambda *arrays: parts(How(plan, jax.nn.silu), *arrays), x, gate_up, down, seed=seed)
    assert found.shape == (plan.groups, plan.M, plan.D)
    np.testing.assert_allclose(np.sum(found, axis=0), expected(x, gate_up, down), rtol=0.01, atol=0.01)
