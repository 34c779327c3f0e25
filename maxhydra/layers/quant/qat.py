"""Quantization-aware training: forward with rounded weights, and optionally activations, backward without rounding.

Rounding has zero gradient almost everywhere, so the gradient with respect to the rounded value is used for the original
one (straight-through estimator, Bengio et al., 2013). The forward pass is the same matmul that decoding computes with
the quantized weight, so the two agree bit for bit if activations are not rounded.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from maxhydra.config.schema.quantization import QAT, QuantizationKind
from maxhydra.layers.quant import int4, int8
from maxhydra.layers.quant.rules import QuantRule

Matmul = Callable[[jax.Array, jax.Array], jax.Array]
Rounding = Callable[[jax.Array], jax.Array]


class QatMatmul(NamedTuple):
    """The matmul of a weight that will be quantized after training."""

    quantized: Matmul
    """(x, weight) -> x @ quantized weight, as decoding computes it."""
    rounded: Rounding
    """weight -> the weight after quantization and dequantization."""
    plain: Matmul
    """(x, weight) -> x @ weight without rounding."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through_matmul(matmul: QatMatmul, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ quantized weight, with straight-through gradients."""
    return matmul.quantized(x, weight)


def _matmul_forward(
    matmul: QatMatmul, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul.quantized(x, weight), (x, weight)


def _matmul_backward(
    matmul: QatMatmul, operands: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    _, pull_back = jax.vjp(matmul.plain, x, matmul.rounded(weight))
    d_x, d_weight = pull_back(d_out)
    return d_x, d_weight


straight_through_matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(rounded: Rounding, weight: jax.Array) -> jax.Array:
    """The rounded weight, with the gradient of the identity."""
    return rounded(weight)


straight_through.defvjp(lambda rounded, weight: (rounded(weight), None), lambda rounded, _, d_out: (d_out,))


def is_qat(rule: QuantRule | None) -> bool:
    """Whether weights under this rule are rounded in training."""
    return rule is not None and rule.kind in QAT


def round_inputs(rule: QuantRule | None, x: jax.Array, *, inputs: int) -> jax.Array:
    """x [..., *inputs] rounded to int8 with one scale per token, if the rule asks for that."""
    if rule is None or not rule.rounds_inputs:
        return x
    return straight_through(partial(int8.rounded_weight, over=tuple(range(x.ndim - inputs, x.ndim))), x)


def rounding(rule: QuantRule, *, inputs: int, name: str, leading: int = 0) -> Rounding:
    """The function that rounds a kernel [*leading, *inputs, *outputs] as the rule's format would."""
    if rule.kind is QuantizationKind.qat_int8:
        return lambda weight: int8.rounded_weight(weight, range(leading, leading + inputs))

    def round_to_int4(weight: jax.Array) -> jax.Array:
        groups = int4.groups_of(math.prod(weight.shape[leading : leading + inputs]), rule.group, name)
        return int4.rounded_weight(weight, inputs=inputs, leading=leading, groups=groups)

    return round_to_int4
