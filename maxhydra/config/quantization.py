"""Number formats of matrix products and weights below model.dtypes.compute."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.patterns import unreadable


class QuantizationKind(Enum):
    none = "none"
    fp8 = "fp8"
    int8_weights = "int8_weights"


@schema
class Quantization(Schema):
    """Which projections are computed in 8 bits when training, or kept in 8 bits when decoding."""

    kind: QuantizationKind = QuantizationKind.none
    """none; fp8, to train: products in float8, e4m3 forward and e5m2 for gradients, each array with one scale
    (Micikevicius et al., 2022); int8_weights, to decode: weights rounded to int8 as they are loaded, a scale for each
    output, and multiplied in model.dtypes.compute."""
    targets: list[str] = option([])
    """Projections in 8 bits, as regular expressions on <layer kind>/<projection>, such as layer/mlp/up; with
    int8_weights also `embedding` and, where it is not tied, `head`. What no expression matches stays in
    model.dtypes.compute."""

    def check(self) -> Iterator[Problem]:
        if self.kind is QuantizationKind.none and self.targets:
            yield Problem(
                "targets",
                "is not used by kind=none",
                value=self.targets,
                hint="try quantization=fp8 or quantization=int8_weights",
            )
        if self.kind is not QuantizationKind.none and not self.targets:
            hint = f"choose the whole option with quantization={self.kind.value}"
            yield Problem("targets", "is empty, so nothing would be quantised", value=[], hint=hint)
        yield from unreadable("targets", self.targets)
