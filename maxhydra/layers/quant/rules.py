"""Quantization rules: which weights are stored or multiplied in which format, resolved from the config."""

import dataclasses

from maxhydra.config.regex import matches
from maxhydra.config.schema.quantization import Activations, Backward, Quantization, QuantizationKind, QuantizationRule


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
    rule = next((rule for rule in formats if matches(rule.targets, name)), None)
    return None if rule is None or rule.kind is QuantizationKind.none else rule
