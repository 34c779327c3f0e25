"""Number formats of matrix products and weights below model.dtypes.compute."""

import dataclasses
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.regex import unreadable


class QuantizationKind(Enum):
    none = "none"
    fp8 = "fp8"
    int8 = "int8"
    qat_int8 = "qat_int8"
    qat_int4 = "qat_int4"
    int8_weights = "int8_weights"
    int4_weights = "int4_weights"


class Backward(Enum):
    quantized = "quantized"
    compute = "compute"


class Activations(Enum):
    compute = "compute"
    int8 = "int8"


# Ways to train, and ways in which weights are kept that are trained no more.
QAT = (QuantizationKind.qat_int8, QuantizationKind.qat_int4)
TO_TRAIN = (QuantizationKind.fp8, QuantizationKind.int8, *QAT)
TO_KEEP = (QuantizationKind.int8_weights, QuantizationKind.int4_weights)
GROUPED = (QuantizationKind.qat_int4, QuantizationKind.int4_weights)


@schema
class QuantizationRule(Schema):
    """Which projections are computed in fewer bits when training, or kept in fewer bits when decoding."""

    kind: QuantizationKind = QuantizationKind.none
    """none. To train: fp8, products in float8, e4m3 forward and e5m2 for gradients, each array with one scale
    (Micikevicius et al., 2022); int8, products of integers, a scale for each row and each output; qat_int8 and
    qat_int4, the forward pass that int8_weights and int4_weights will have, with the gradient of the weights as they
    are (straight-through, Bengio et al., 2013). To decode: int8_weights, weights rounded to int8 as they are loaded, a
    scale for each output; int4_weights, to four bits, a scale for each group of inputs of an output; both are
    multiplied in model.dtypes.compute."""
    targets: list[str] = option([])
    """Projections that are meant, as regular expressions on <layer kind>/<projection>, such as layer/mlp/up; with
    int8_weights and qat_int8 also `embedding` and, where it is not tied, `head`. What no expression matches stays in
    model.dtypes.compute."""
    group: int | None = option(None, ge=2)
    """int4_weights, qat_int4: inputs of an output that share a scale. null: all."""
    history: int | None = option(None, ge=1)
    """fp8: scale an array by the largest number that it had in so many steps before (delayed scaling), which the
    checkpoint keeps. null: by the largest that it has (current scaling)."""
    backward: Backward = Backward.quantized
    """int8: the two products of the backward pass; quantized: of integers too, the gradient with scales of its own;
    compute: in model.dtypes.compute."""

    activations: Activations = Activations.compute
    """qat_int8, qat_int4: what weights are multiplied with, those of experts left out; int8: rounded too, a scale for
    each token, with the gradient as it is, for engines that multiply integers; compute: as it is, which is what
    int8_weights and int4_weights do here."""

    def check(self) -> Iterator[Problem]:
        kind = self.kind
        if kind is not QuantizationKind.none and not self.targets:
            hint = f"choose the whole option with quantization={kind.value}"
            yield Problem("targets", "is empty, so nothing would be quantised", value=[], hint=hint)
        yield from unreadable("targets", self.targets)
        for name, value, users in (
            ("group", self.group, GROUPED),
            ("history", self.history, (QuantizationKind.fp8,)),
            ("backward", None if self.backward is Backward.quantized else self.backward, (QuantizationKind.int8,)),
            ("activations", None if self.activations is Activations.compute else self.activations, QAT),
        ):
            if value is not None and kind not in users:
                told = ", ".join(user.value for user in users)
                yield Problem(name, f"is not used by kind={kind.value}", value=value, hint=f"{told} use it")
        if self.group is not None and self.group % 2:
            yield Problem("group", "is odd, and a byte holds two inputs", value=self.group, accepted="even numbers")


@schema
class Quantization(QuantizationRule):
    """The rule of most projections, and others for some."""

    overrides: dict[str, QuantizationRule] = option({})
    """Rules by names of your own for projections that want another format; the first that matches a projection holds,
    and the one above holds after them. kind=none leaves its targets in model.dtypes.compute."""

    @property
    def rules(self) -> dict[str, QuantizationRule]:
        """Every rule by its path below this section, in the order in which they are asked."""
        return {**{f"overrides.{name}": rule for name, rule in self.overrides.items()}, "": self}

    @property
    def kinds(self) -> set[QuantizationKind]:
        """All that it does; empty where it does nothing."""
        return {rule.kind for rule in self.rules.values()} - {QuantizationKind.none}

    def without_history(self) -> "Quantization":
        """The same for a model that remembers nothing."""
        overrides = {name: dataclasses.replace(rule, history=None) for name, rule in self.overrides.items()}
        return dataclasses.replace(self, history=None, overrides=overrides)

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        if self.kind is QuantizationKind.none and self.targets:
            hint = "try quantization=fp8 or quantization=int8_weights"
            yield Problem("targets", "is not used by kind=none", value=self.targets, hint=hint)
        if self.overrides and self.kind is QuantizationKind.none:
            reason = "are exceptions to a rule, and kind=none is none"
            yield Problem(
                "overrides", reason, value=sorted(self.overrides), hint="choose quantization=... for the others"
            )
        first = TO_TRAIN if self.kind in TO_TRAIN else TO_KEEP
        for name, rule in self.overrides.items():
            if rule.kind not in (*first, QuantizationKind.none):
                reason = f"does not go with kind={self.kind.value}: the one is to train, the other to decode"
                accepted = ", ".join(kind.value for kind in first)
                yield Problem(f"overrides.{name}.kind", reason, value=rule.kind, accepted=accepted)
