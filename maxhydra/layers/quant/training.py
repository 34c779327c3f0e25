"""Quantization in training: rules, quantization-aware training (QAT), and amax histories of FP8.

Rules resolve from the config which weights are stored or multiplied in which format.

QAT runs the forward pass with rounded weights, and optionally activations, and the backward pass without rounding.
Rounding has zero gradient almost everywhere, so the gradient with respect to the rounded value is used for the original
one (straight-through estimator, Bengio et al., 2013). The forward pass is the same matmul that decoding computes with
the quantized weight, so the two agree bit for bit if activations are not rounded.

An amax history serves delayed scaling (kernels/fp8_matmul). It is not a weight: the optimizer does not see it, and its
"gradient" is the newest column, the amaxes of this step. It is stored next to the kernel of its projection and travels
with the weights.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema.quantization import (
    QAT,
    Activations,
    Backward,
    Quantization,
    QuantizationKind,
    QuantizationRule,
)
from maxhydra.config.values import matches_any
from maxhydra.layers.quant import int4, int8


@dataclasses.dataclass(frozen=True)
class QuantRule:
    """How the weights that match `targets` are quantized."""

    kind: QuantizationKind
    targets: tuple[str, ...]
    """Regular expressions on weight names; the vocabulary matrices are `embedding` and `head`."""
    group: int | None = None
    history: int | None = None
    is_wide_back: bool = False
    """Whether the backward matmuls run in the compute dtype."""
    rounds_inputs: bool = False
    """Whether inputs of the matmul are rounded to int8."""

    @classmethod
    def of(cls, rule: QuantizationRule) -> "QuantRule":
        return cls(
            kind=rule.kind,
            targets=tuple(rule.targets),
            group=rule.group,
            history=rule.history,
            is_wide_back=rule.backward is Backward.compute,
            rounds_inputs=rule.activations is Activations.int8,
        )


def resolve_rules(quantization: Quantization | None) -> tuple[QuantRule, ...]:
    """The rules of a config in order of precedence: overrides, then the base rule."""
    if quantization is None:
        return ()
    return tuple(QuantRule.of(rule) for rule in (*quantization.overrides.values(), quantization))


def format_of(formats: tuple[QuantRule, ...], name: str) -> QuantRule | None:
    """The first rule that matches a weight name; None if the weight is not quantized."""
    rule = next((rule for rule in formats if matches_any(rule.targets, name)), None)
    return None if rule is None or rule.kind is QuantizationKind.none else rule


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


# Input, kernel, and gradient of the output.
ARRAYS = 3


class AmaxHistory(nnx.Variable):
    """Amaxes [arrays, steps], newest step first."""


@jax.custom_vjp
def merge_histories(histories: Sequence[jax.Array]) -> jax.Array:
    """One history for a fused matmul of several projections; each gets the amaxes of the fused matmul."""
    return jnp.max(jnp.stack(list(histories)), axis=0)


merge_histories.defvjp(
    lambda histories: (merge_histories(histories), len(histories)), lambda count, amaxes: ([amaxes] * count,)
)
