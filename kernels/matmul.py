"""Matrix products: with weights, and those whose result is wider than their inputs, such as logits in float32."""

import math
from enum import Enum
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


class Layout(Enum):
    """How weights lie in memory, and with it how a few rows are multiplied with them."""

    plain = "plain"
    outputs_first = "outputs_first"
    """For a CPU."""
    joined = "joined"
    """For a GPU: outputs first, and weights that share an input as one."""


# Up to here the weight is better off on the left: at 128 rows by a tenth, at 512 it is a sixth slower.
FEW_ROWS = 128


def widening_einsum(equation: str, a: jax.Array, b: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """einsum of a and b, accumulated and returned in dtype.

    The gradient arrives in the wide type. Left alone, the two products of the backward pass would then run wholly in
    float32, at a fraction of the speed of the forward pass; it is rounded once to the inputs' type instead.
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


def projected(
    equation: str, x: jax.Array, weight: jax.Array, *, layout: Layout, dtype: DTypeLike | None = None
) -> jax.Array:
    """einsum of activations and a weight, widened to dtype if there is one; inputs are the last dimensions of x.

    With outputs_first and few rows the weight is the left operand and the result is turned round afterwards. XLA's
    products on a CPU are then twice as fast for 2 to 32 rows, if the weight lies in memory with its outputs first
    (SmolLM2's layers at 8 rows: 105 ms of processor time instead of 215). The barrier keeps the compiler from turning
    it back. With joined, one row is multiplied and summed without a matrix unit, at the speed of memory.
    """
    of_x, of_weight = equation.split("->")[0].split(",")
    inputs = [place for place, name in enumerate(of_weight) if name in of_x]
    rows = math.prod(x.shape[: x.ndim - len(inputs)])
    if layout is Layout.joined and rows == 1:
        return _summed(x, weight, inputs, dtype or x.dtype)
    if layout is not Layout.outputs_first or rows > FEW_ROWS:
        return jnp.einsum(equation, x, weight) if dtype is None else widening_einsum(equation, x, weight, dtype=dtype)
    outputs = weight.ndim - len(inputs)
    # Spelled out: einsum takes several inputs in an order of its own, and would turn the weight round for it.
    last = list(range(x.ndim - len(inputs), x.ndim))
    turned = jax.lax.dot_general(weight, x, ((inputs, last), ((), ())), preferred_element_type=dtype)
    turned = jax.lax.optimization_barrier(turned)
    return jnp.moveaxis(turned, range(outputs), range(-outputs, 0))


def _summed(x: jax.Array, weight: jax.Array, inputs: list[int], dtype: DTypeLike) -> jax.Array:
    """The product of one row: every output is a sum over numbers that lie together."""
    last = range(-len(inputs), 0)
    rows, row = x.shape[: x.ndim - len(inputs)], x.reshape(x.shape[x.ndim - len(inputs) :]).astype(jnp.float32)
    turned = jnp.moveaxis(weight, inputs, last)
    out = jnp.sum(turned.astype(jnp.float32) * row, axis=tuple(last))
    return out.reshape(*rows, *out.shape).astype(dtype)
