"""Schema of adapters, small trainable additions to frozen weights."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.regex import regex_problems


class AdapterKind(Enum):
    none = "none"
    lora = "lora"
    qlora = "qlora"


NEEDED = ("rank", "alpha", "dropout", "targets")


@schema
class Adapter(Schema):
    """Adapter that is trained instead of the model's own weights, which are frozen."""

    kind: AdapterKind = AdapterKind.none
    """none trains the model's own weights; lora a low-rank update of selected projections (Hu et al., 2021); qlora the
    same over projections quantized to 4 bits (Dettmers et al., 2023)."""
    rank: int | None = option(None, ge=1)
    """lora, qlora: rank of the update."""
    alpha: float | None = option(None, gt=0)
    """lora, qlora: the update is scaled by alpha / rank."""
    dropout: float | None = option(None, ge=0, lt=1)
    """lora, qlora: dropout rate on the adapter's inputs in training."""
    targets: list[str] | None = None
    """lora, qlora: projections with an adapter, as regular expressions on <layer kind>/<projection>, such as
    layer/mlp/up."""

    def check(self) -> Iterator[Problem]:
        for name in NEEDED:
            value = getattr(self, name)
            if self.kind is AdapterKind.none and value is not None:
                yield Problem(name, "is not used by kind=none", value=value, accepted="null", hint="try adapter=lora")
            if self.kind is not AdapterKind.none and value is None:
                kind = self.kind.value
                hint = f"set it, or choose the option adapter={kind}, which sets all fields"
                yield Problem(name, f"is needed by kind={kind}", value=None, hint=hint)
        yield from regex_problems("targets", self.targets or [])
