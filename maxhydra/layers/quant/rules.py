"""Which weights of a model are kept or multiplied in fewer bits, resolved from the rules of a config."""

import dataclasses

from maxhydra.config.regex import matches
from maxhydra.config.schema.quantization import Activations, Backward, Quantization, QuantizationKind, QuantizationRule


@dataclasses.dataclass(frozen=True)
class QuantRule:
    """What a rule does with the weights that it is for."""

    kind: QuantizationKind
    targets: tuple[str, ...]
    """Regular expressions on names of weights; the two ends of the model are `embedding` and `head`."""
    group: int | None = None
    history: int | None = None
    is_wide_back: bool = False
    """Whether gradients are multiplied as they come."""
    rounds_inputs: bool = False
    """Whether what enters a product is rounded to int8."""

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


def formats_of(quantization: Quantization | None) -> tuple[QuantRule, ...]:
    """In the order in which they are asked."""
    if quantization is None:
        return ()
    return tuple(QuantRule.of(rule) for rule in (*quantization.overrides.values(), quantization))


def format_of(formats: tuple[QuantRule, ...], name: str) -> QuantRule | None:
    """That of the weight of this name; None where it is a plain one."""
    found = next((one for one in formats if matches(one.targets, name)), None)
    return None if found is None or found.kind is QuantizationKind.none else found
