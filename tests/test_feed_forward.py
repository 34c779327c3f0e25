"""Gate, up and down in one kernel for Hopper where there is none: hopper.py runs it, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import run

from maxhydra.kernels import fused_product
from maxhydra.kernels.fused_product import Norm, feed_forward
from maxhydra.kernels.fused_product import plan as plans
from maxhydra.kernels.fused_product.mosaic import How, parts
from maxhydra.kernels.fused_product.plan import Plan, can_serve

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


@pytest.mark.parametrize("is_there", [False, True])
def test_it_is_added_to_the_stream_with_the_kernel_and_without(monkeypatch, is_there):
    x, gate_up, down = draw(TINY, seed=5)
    monkeypatch.setattr(Plan, "of", lambda *_: TINY)
    monkeypatch.setattr(fused_product, "can_serve", lambda *_: is_there)
    found, nothing = run(lambda *arrays: feed_forward(*arrays, jax.nn.silu, x, None), x, gate_up, down)
    wanted = np.asarray(x, np.float64) + expected(x, gate_up, down)
    assert nothing is None and found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0.02, atol=0.02)


def test_the_norm_comes_along_where_it_is_asked_for():
    x, gate_up, down = draw(TINY, seed=6)
    norm = Norm(jnp.full((TINY.D,), 0.5, jnp.bfloat16), offset=1.0, eps=0.1)
    stream, normed = jax.jit(lambda *arrays: feed_forward(*arrays, jax.nn.silu, x, norm))(x, gate_up, down)
    wanted = np.asarray(stream, np.float64)
    wanted = 1.5 * wanted / np.sqrt(np.mean(wanted**2, axis=1, keepdims=True) + 0.1)
    np.testing.assert_allclose(np.asarray(normed, np.float64), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("changes", [{}, {"M": 16}, {"D": 4096, "F": 14336}])
def test_it_lowers_where_there_is_no_hopper(changes):
    sizes = {"M": 64, "D": 2048, "F": 8192} | changes
    plan = Plan.of(**sizes)
    assert plan.fits
    shapes = ((plan.M, plan.D), (2 * plan.F, plan.D), (plan.D, plan.F))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    how = How(plan, lambda x: jax.nn.gelu(x, approximate=True) if changes else jax.nn.silu(x))
    lowered = jax.jit(lambda *arrays: parts(how, *arrays)).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_sizes_that_do_not_divide_and_other_devices_go_another_way(monkeypatch):
    sizes, dtype = (64, 2048, 8192), "bfloat16"
    assert not can_serve(Plan.of(*sizes), dtype)
    monkeypatch.setattr(plans, "capability", lambda: "9.0")
    assert can_serve(Plan.of(*sizes), dtype) and can_serve(Plan.of(32, 3072, 8192), dtype)
    assert not can_serve(Plan.of(*sizes), "float32")
    assert not any(can_serve(Plan.of(*one), dtype) for one in ((12, 2048, 8192), (64, 1152, 6912), (128, 2048, 8192)))
    monkeypatch.setattr(plans, "processors", lambda: 114)
    assert not can_serve(Plan.of(*sizes), dtype)
