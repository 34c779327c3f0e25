"""Embedding rows of a table that is split over simulated devices, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.layers import Context
from maxhydra.layers.table_lookup import look_up
from maxhydra.sharding import Sharder, build_mesh

V, D, B, T = 32, 16, 8, 8


def rows_and_gradient(sharder: Sharder, tokens_BT: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    table_VD = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
    ctx = Context(positions=jnp.zeros((B, T), jnp.int32), segments=None, sharder=sharder, cache=None, dropout_key=None)
    weights_BTD = jnp.asarray(np.random.default_rng(1).integers(-4, 5, size=(B, T, D)), dtype)

    def total(table_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows_BTD = look_up(table_VD, tokens_BT, ctx, dtype=jnp.dtype(dtype))
        return jnp.sum((rows_BTD * weights_BTD).astype(jnp.float32)), rows_BTD

    (_, rows_BTD), d_table_VD = jax.jit(jax.value_and_grad(total, has_aux=True))(table_VD)
    return rows_BTD, d_table_VD


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 4, "tensor": 2},
        {"data": 2, "fsdp": 2, "sequence": 2},
        {"expert": 2, "sequence": 2, "tensor": 2},
        {"data": 8},
    ],
    ids=str,
)
def test_rows_and_gradient_equal_one_device(axes: dict[str, int]) -> None:
    """Gradients of repeated tokens are summed in float32: integers up to 4 * B * T stay exact."""
    tokens_BT = jnp.asarray(np.random.default_rng(2).integers(0, V // 2, size=(B, T)), jnp.int32).at[0].set(V - 1)
    sharder = Sharder(build_mesh(Mesh(**axes), jax.devices()[:8]), RULES)
    for got, want in zip(
        rows_and_gradient(sharder, tokens_BT, "bfloat16"),
        rows_and_gradient(Sharder.single(), tokens_BT, "bfloat16"),
        strict=True,
    ):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_unknown_ids_give_nan() -> None:
    tokens_BT = jnp.zeros((B, T), jnp.int32).at[0, 0].set(V)
    sharder = Sharder(build_mesh(Mesh(fsdp=4, tensor=2), jax.devices()[:8]), RULES)
    rows_BTD, _ = rows_and_gradient(sharder, tokens_BT, "float32")
    assert np.isnan(rows_BTD[0, 0]).all() and not np.isnan(rows_BTD[0, 1:]).any()
