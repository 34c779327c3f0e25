"""Products in float8 for training (Micikevicius et al., 2022): e4m3 forward, where numbers are alike in size, e5m2 for
gradients, which need its range.

An array is scaled as a whole by its own largest number, anew at every use. Scales are powers of two, so that scaling
rounds nothing. Written as products of numbers scaled back, which XLA recognises for GPUs that multiply float8, and
which means the same wherever there is no such unit.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Scaled(NamedTuple):
    """numbers * scale is the array."""

    numbers: jax.Array
    scale: jax.Array

    def wide(self, dtype: np.dtype) -> jax.Array:
        return self.numbers.astype(dtype) * self.scale.astype(dtype)


def scaled(x: jax.Array, dtype: np.dtype) -> Scaled:
    """x in the format, its largest number in the upper half of the format's range."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    scale = jnp.ldexp(jnp.float32(1), exponent)
    # Kept from being fused with what makes x: XLA would keep that in float32, and read twice the bytes. The largest
    # number is found on the way.
    numbers = jax.lax.optimization_barrier(x).astype(jnp.float32) / scale
    return Scaled(numbers.astype(dtype), scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def float8_product(inputs: int, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., *inputs] times weight [*inputs, *outputs]; `inputs` says how many dimensions those are."""
    return _forward(inputs, x, weight)[0]


def _forward(inputs: int, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    operands = scaled(x, FORWARD), scaled(weight, FORWARD)
    contracted = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
    return _dot(*operands, contracted, x.dtype, precision=None), operands


def _backward(inputs: int, operands: tuple[Scaled, Scaled], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of gradients run over every token, and are kept exact: Hopper's fast sums hold 14 bits."""
    x, weight = operands
    narrow = scaled(d_out, BACKWARD)
    rows = tuple(range(x.numbers.ndim - inputs))
    outputs = tuple(range(len(rows), d_out.ndim)), tuple(range(inputs, weight.numbers.ndim))
    highest = jax.lax.Precision.HIGHEST
    d_x = _dot(narrow, weight, outputs, d_out.dtype, precision=highest)
    return d_x, _dot(x, narrow, (rows, rows), d_out.dtype, precision=highest)


float8_product.defvjp(_forward, _backward)


def _dot(
    a: Scaled,
    b: Scaled,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: np.dtype,
    *,
    precision: jax.lax.Precision | None,
) -> jax.Array:
    dimensions = (contracted, ((), ()))
    return jax.lax.dot_general(
        a.wide(dtype), b.wide(dtype), dimensions, precision=precision, preferred_element_type=dtype
    )
