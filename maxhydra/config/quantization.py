"""Number formats of matrix products below model.dtypes.compute."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.patterns import unreadable


class QuantizationKind(Enum):
    none = "none"
    fp8 = "fp8"


@schema
class Quantization(Schema):
    """Which projections are computed in 8 bits when training, and how."""

    kind: QuantizationKind = QuantizationKind.none
    """none; fp8: products in float8, e4m3 forward and e5m2 for gradients, each array with one scale (Micikevicius et
    al., 2022)."""
    targets: list[str] = option([])
    """fp8: projections in float8, as regular expressions on <layer kind>/<projection>, such as layer/mlp/up. The head
    and what no expression matches stay in model.dtypes.compute."""

    def check(self) -> Iterator[Problem]:
        if self.kind is QuantizationKind.none and self.targets:
            yield Problem("targets", "is not used by kind=none", value=self.targets, hint="try quantization=fp8")
        if self.kind is not QuantizationKind.none and not self.targets:
            hint = f"choose the whole option with quantization={self.kind.value}"
            yield Problem("targets", "is empty, so nothing would be quantised", value=[], hint=hint)
        yield from unreadable("targets", self.targets)
