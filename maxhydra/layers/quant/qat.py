"""Training for numbers that will be rounded: forward with rounded weights, and perhaps activations, backward as if
rounding were not there.

Rounding has no slope, so the gradient of what is rounded is taken for that of what it was (straight-through estimator,
Bengio et al., 2013). Forward is the very product that decoding makes of the rounded weight, which it then repeats bit
for bit where activations are as they are.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from maxhydra.config.schema.quantization import QAT, QuantizationKind
from maxhydra.layers.quant import int4, int8
from maxhydra.layers.quant.rules import QuantRule

Product = Callable[[jax.Array, jax.Array], jax.Array]
Rounding = Callable[[jax.Array], jax.Array]


class QatMatmul(NamedTuple):
    """How a weight will be kept and used."""

    product: Product
    """(x, weight) -> the product of x with the rounded weight, as decoding makes it."""
    rounded: Rounding
    """weight -> what it is after rounding, as plain numbers."""
    plain: Product
    """(x, weight) -> the product with a weight as it is."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_product(way: QatMatmul, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x times the rounded weight."""
    return way.product(x, weight)


def _product_forward(way: QatMatmul, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return way.product(x, weight), (x, weight)


def _product_backward(
    way: QatMatmul, operands: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    _, pull_back = jax.vjp(way.plain, x, way.rounded(weight))
    d_x, d_weight = pull_back(d_out)
    return d_x, d_weight


straight_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight(rounded: Rounding, weight: jax.Array) -> jax.Array:
    """The rounded weight."""
    return rounded(weight)


straight.defvjp(lambda rounded, weight: (rounded(weight), None), lambda rounded, _, d_out: (d_out,))


def is_trained_for(form: QuantRule | None) -> bool:
    """Whether weights in this format are rounded on their way through training."""
    return form is not None and form.kind in QAT


def entering(form: QuantRule | None, x: jax.Array, *, inputs: int) -> jax.Array:
    """What a product takes of x [..., *inputs]: rounded, a scale for each token, where its format says so."""
    if form is None or not form.rounds_inputs:
        return x
    return straight(partial(int8.rounded_weight, over=tuple(range(x.ndim - inputs, x.ndim))), x)


def rounding(form: QuantRule, *, inputs: int, name: str, leading: int = 0) -> Rounding:
    """What a kernel [*leading, *inputs, *outputs] becomes, in its own number format."""
    if form.kind is QuantizationKind.qat_int8:
        return lambda weight: int8.rounded_weight(weight, range(leading, leading + inputs))

    def to_int4(weight: jax.Array) -> jax.Array:
        groups = int4.groups_of(math.prod(weight.shape[leading : leading + inputs]), form.group, name)
        return int4.rounded_weight(weight, inputs=inputs, leading=leading, groups=groups)

    return to_int4
