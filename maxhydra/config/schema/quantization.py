"""Schema of quantization and adapters.

Quantization: formats of matmuls in training and of weights in decoding. Adapters: small trainable additions to frozen
weights.
"""

import dataclasses
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import MAX_WIDTH, Schema, option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.values import regex_problems


class QuantizationKind(Enum):
    none = "none"
    fp8 = "fp8"
    int8 = "int8"
    qat_int8 = "qat_int8"
    qat_int4 = "qat_int4"
    int8_weights = "int8_weights"
    int4_weights = "int4_weights"
    mxfp4_weights = "mxfp4_weights"


class Backward(Enum):
    quantized = "quantized"
    compute = "compute"


class Activations(Enum):
    compute = "compute"
    int8 = "int8"


# Kinds for training, and kinds in which weights are stored for decoding.
QAT = (QuantizationKind.qat_int8, QuantizationKind.qat_int4)
TRAINING_KINDS = (QuantizationKind.fp8, QuantizationKind.int8, *QAT)
STORED_KINDS = (QuantizationKind.int8_weights, QuantizationKind.int4_weights, QuantizationKind.mxfp4_weights)
# Formats of the matmuls of a training step, as hardware.peak_tflops names them.
MATMUL_DTYPES = {QuantizationKind.fp8: "float8", QuantizationKind.int8: "int8"}
GROUPED = (QuantizationKind.qat_int4, QuantizationKind.int4_weights)


@schema
class QuantizationRule(Schema):
    """Projections whose matmuls are quantized in training, or whose weights are quantized in decoding."""

    kind: QuantizationKind = QuantizationKind.none
    """none. For training: fp8, float8 matmuls with e4m3 forward and e5m2 gradients, one scale per tensor (Micikevicius
    et al., 2022); int8, integer matmuls with a scale per row and per output channel; qat_int8 and qat_int4,
    quantization-aware training for int8_weights and int4_weights with straight-through gradients (Bengio et al.,
    2013). For decoding: int8_weights, weights quantized when loaded, a scale per output channel; int4_weights, a scale
    per group of inputs; mxfp4_weights, E2M1 codes and a power of two per 32 inputs (Open Compute Project, 2023), which
    keep the values of weights that are stored so. They are dequantized to model.dtypes.compute for the matmul."""
    targets: list[str] = option([])
    """Projections to quantize: regular expressions on <layer kind>/<projection>, such as layer/mlp/up; int8_weights and
    qat_int8 also support `embedding` and, if it is not tied, `head`. All others stay in model.dtypes.compute."""
    group: int | None = option(None, ge=2)
    """int4_weights, qat_int4: group size, the inputs of an output channel that share a scale. null: all."""
    history: int | None = option(None, ge=1)
    """fp8: length of the amax history for delayed scaling, which is part of the checkpoint. null: current scaling,
    by the amax of the tensor itself."""
    backward: Backward = Backward.quantized
    """int8: matmuls of the backward pass; quantized: integer matmuls, with separate scales for the gradient; compute:
    in model.dtypes.compute."""

    activations: Activations = Activations.compute
    """qat_int8, qat_int4: activations, except those of experts; int8: fake-quantized with a scale per token and
    straight-through gradients, for engines with integer matmuls; compute: not quantized, as int8_weights and
    int4_weights run here."""

    def check(self) -> Iterator[Problem]:
        kind = self.kind
        if kind is not QuantizationKind.none and not self.targets:
            hint = f"quantization={kind.value} selects an option with targets"
            yield Problem("targets", "is empty, so nothing would be quantized", value=[], hint=hint)
        yield from regex_problems("targets", self.targets)
        for name, value, users in (
            ("group", self.group, GROUPED),
            ("history", self.history, (QuantizationKind.fp8,)),
            ("backward", None if self.backward is Backward.quantized else self.backward, (QuantizationKind.int8,)),
            ("activations", None if self.activations is Activations.compute else self.activations, QAT),
        ):
            if value is not None and kind not in users:
                kinds = ", ".join(user.value for user in users)
                yield Problem(name, f"is not used by kind={kind.value}", value=value, hint=f"it is used by {kinds}")
        if self.group is not None and self.group % 2:
            yield Problem(
                "group", "is odd, but two inputs are packed into a byte", value=self.group, accepted="even numbers"
            )


@schema
class Quantization(QuantizationRule):
    """The quantization rule of most projections, and overrides for some of them."""

    overrides: dict[str, QuantizationRule] = option({})
    """Rules for projections with another format, by a name of your choice. The first one that matches a projection is
    used, then the rule above. kind=none leaves its targets in model.dtypes.compute."""

    @property
    def rules(self) -> dict[str, QuantizationRule]:
        """All rules by path below this section, in the order in which they are matched."""
        return {**{f"overrides.{name}": rule for name, rule in self.overrides.items()}, "": self}

    @property
    def kinds(self) -> set[QuantizationKind]:
        """The kinds in use, without none."""
        return {rule.kind for rule in self.rules.values()} - {QuantizationKind.none}

    def without_history(self) -> "Quantization":
        """Return the same rules with current scaling, for a model without an amax history."""
        overrides = {name: dataclasses.replace(rule, history=None) for name, rule in self.overrides.items()}
        return dataclasses.replace(self, history=None, overrides=overrides)

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        if self.kind is QuantizationKind.none and self.targets:
            hint = "try quantization=fp8 or quantization=int8_weights"
            yield Problem("targets", "is not used by kind=none", value=self.targets, hint=hint)
        if self.overrides and self.kind is QuantizationKind.none:
            reason = "need a base rule, but quantization.kind is none"
            yield Problem(
                "overrides", reason, value=sorted(self.overrides), hint="choose the base rule with quantization=..."
            )
        first = TRAINING_KINDS if self.kind in TRAINING_KINDS else STORED_KINDS
        for name, rule in self.overrides.items():
            if rule.kind not in (*first, QuantizationKind.none):
                reason = f"cannot be combined with kind={self.kind.value}: one is for training, the other for decoding"
                accepted = ", ".join(kind.value for kind in first)
                yield Problem(f"overrides.{name}.kind", reason, value=rule.kind, accepted=accepted)


class AdapterKind(Enum):
    none = "none"
    lora = "lora"
    qlora = "qlora"


class AdapterInit(Enum):
    normal = "normal"
    pissa = "pissa"


NEEDED = ("rank", "alpha", "dropout", "targets")


@schema
class Adapter(Schema):
    """Adapter that is trained instead of the model's own weights, which are frozen."""

    kind: AdapterKind = AdapterKind.none
    """none trains the model's own weights; lora a low-rank update of selected projections (Hu et al., 2021); qlora the
    same over projections quantized to 4 bits (Dettmers et al., 2023)."""
    rank: int | None = option(None, ge=1, le=MAX_WIDTH)
    """lora, qlora: rank of the update."""
    alpha: float | None = option(None, gt=0)
    """lora, qlora: the update is scaled by alpha / rank, or as rank_stabilized says."""
    rank_stabilized: bool = False
    """Scale the update by alpha / sqrt(rank), so that a large rank learns as fast as a small one (rsLoRA,
    Kalajdzievski, 2023)."""
    dora: bool = False
    """Train the norm of each column of an adapted weight separately from its direction (DoRA, Liu et al., 2024)."""
    init: AdapterInit = AdapterInit.normal
    """normal: a is random and b is 0; pissa: the largest singular values and vectors of the weight, which are
    subtracted from it, so that training starts at the base model too (PiSSA, Meng et al., 2024)."""
    b_rate_ratio: float = option(1.0, gt=0)
    """Learning rate of b relative to that of a; 16 is usual for LoRA+ (Hayou et al., 2024)."""
    dropout: float | None = option(None, ge=0, lt=1)
    """lora, qlora: dropout rate on the adapter's inputs in training."""
    targets: list[str] | None = None
    """lora, qlora: projections with an adapter, as regular expressions on <layer kind>/<projection>, such as
    layer/mlp/up."""
    parameters: list[str] = option([])
    """lora, qlora: other weights with an adapter, as regular expressions on their names: `embedding`, `head` if it is
    not tied, and the matrices of all experts, such as layer/mlp/experts/up. With tied weights the adapter of
    `embedding` is part of the head too. With qlora these weights keep their dtype."""

    @property
    def is_enabled(self) -> bool:
        """Whether adapters are trained, and the model's own weights are frozen."""
        return self.kind is not AdapterKind.none

    def check(self) -> Iterator[Problem]:
        for name in NEEDED:
            value = getattr(self, name)
            if self.kind is AdapterKind.none and value is not None:
                yield Problem(name, "is not used by kind=none", value=value, accepted="null", hint="try adapter=lora")
            if self.kind is not AdapterKind.none and value is None:
                kind = self.kind.value
                hint = f"set it, or choose the option adapter={kind}, which sets all fields"
                yield Problem(name, f"is needed by kind={kind}", value=None, hint=hint)
        for name in ("rank_stabilized", "dora", "init", "b_rate_ratio"):
            value = getattr(self, name)
            if self.kind is AdapterKind.none and value != getattr(Adapter, name):
                yield Problem(name, "is not used by kind=none", value=value, hint="try adapter=lora")
        yield from self._parameter_problems()
        if self.is_enabled and self.targets == [] and not self.parameters:
            hint = "set adapter.targets or adapter.parameters; adapter=none trains the model's own weights"
            yield Problem("targets", "selects nothing to adapt, and parameters is empty too", value=[], hint=hint)
        if self.kind is AdapterKind.qlora and self.init is AdapterInit.pissa:
            reason = "is not supported by kind=qlora, whose base weights are rounded before they could be split"
            yield Problem("init", reason, value=self.init, accepted="normal, or kind=lora")
        yield from regex_problems("targets", self.targets or [])
        yield from regex_problems("parameters", self.parameters)

    def _parameter_problems(self) -> Iterator[Problem]:
        """Problems of settings that adapter.parameters does not support."""
        if self.kind is AdapterKind.none and self.parameters:
            reason, hint = "is not used by kind=none", "try adapter=lora"
            yield Problem("parameters", reason, value=self.parameters, accepted="[]", hint=hint)
        if self.parameters and self.dora:
            reason = "is not supported for weights of adapter.parameters, only for projections of adapter.targets"
            yield Problem("dora", reason, value=True, accepted="false", hint="or set adapter.parameters=[]")
        if self.parameters and self.dropout:
            reason = "is not supported for weights of adapter.parameters, only for projections of adapter.targets"
            yield Problem("dropout", reason, value=self.dropout, accepted="0", hint="or set adapter.parameters=[]")
