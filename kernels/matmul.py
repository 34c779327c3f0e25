"""Matmuls with weights, and matmuls whose output dtype is wider than their inputs, such as float32 logits."""

import math
from enum import Enum
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


class Layout(Enum):
    """The memory layout of weights, which decides how a few rows are multiplied by them."""

    plain = "plain"
    outputs_first = "outputs_first"
    """Output dimensions first, for a CPU."""
    joined = "joined"
    """For a GPU: output dimensions first, and weights that share an input concatenated."""


# Number of rows up to which the weight is the left operand: at 128 rows that is 10 % faster, at 512 a sixth slower.
FEW_ROWS = 128


def widening_einsum(equation: str, a: jax.Array, b: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """einsum of a and b, accumulated and returned in dtype.

    The cotangent arrives in the wide dtype, so the two matmuls of the backward pass would run in float32, at a fraction
    of the speed of the forward pass. It is rounded once to the dtype of the inputs instead.
    """
    dtype = jnp.dtype(dtype)
    if a.dtype == b.dtype and dtype.itemsize > a.dtype.itemsize:
        return _widening(equation, dtype, a, b)
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _widening(equation: str, dtype: np.dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _forward(equation: str, dtype: np.dtype, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple]:
    return _widening(equation, dtype, a, b), (a, b)


def _backward(equation: str, dtype: np.dtype, inputs: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, pull_back = jax.vjp(partial(jnp.einsum, equation), *inputs)
    return pull_back(cotangent.astype(inputs[0].dtype))


_widening.defvjp(_forward, _backward)


def project(
    equation: str, x: jax.Array, weight: jax.Array, *, layout: Layout, dtype: DTypeLike | None = None
) -> jax.Array:
    """einsum of activations and a weight, in `dtype` if given; the contracted dimensions are the last ones of x.

    With outputs_first and few rows, the weight is the left operand and the result is transposed afterwards. XLA's
    matmuls on a CPU are then twice as fast for 2 to 32 rows, if the weight is stored with its outputs first (SmolLM2's
    layers at 8 rows: 105 ms of CPU time instead of 215). The barrier keeps the compiler from undoing the transpose.
    With joined, a single row is a multiply and a sum without the tensor cores, at memory bandwidth.
    """
    x_axes, weight_axes = equation.split("->")[0].split(",")
    inputs = [axis for axis, name in enumerate(weight_axes) if name in x_axes]
    rows = math.prod(x.shape[: x.ndim - len(inputs)])
    if layout is Layout.joined and rows == 1:
        return _gemv(x, weight, inputs, dtype or x.dtype)
    if layout is not Layout.outputs_first or rows > FEW_ROWS:
        return jnp.einsum(equation, x, weight) if dtype is None else widening_einsum(equation, x, weight, dtype=dtype)
    outputs = weight.ndim - len(inputs)
    # dot_general instead of einsum, which would order several contracted dimensions itself and transpose the weight.
    last = list(range(x.ndim - len(inputs), x.ndim))
    out_transposed = jax.lax.dot_general(weight, x, ((inputs, last), ((), ())), preferred_element_type=dtype)
    out_transposed = jax.lax.optimization_barrier(out_transposed)
    return jnp.moveaxis(out_transposed, range(outputs), range(-outputs, 0))


def _gemv(x: jax.Array, weight: jax.Array, inputs: list[int], dtype: DTypeLike) -> jax.Array:
    """Multiply one row by the weight: every output is a sum over contiguous elements."""
    last = range(-len(inputs), 0)
    rows, row = x.shape[: x.ndim - len(inputs)], x.reshape(x.shape[x.ndim - len(inputs) :]).astype(jnp.float32)
    weight_by_output = jnp.moveaxis(weight, inputs, last)
    out = jnp.sum(weight_by_output.astype(jnp.float32) * row, axis=tuple(last))
    return out.reshape(*rows, *out.shape).astype(dtype)
