"""Fields of task=dpo."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task


class PreferenceLoss(Enum):
    sigmoid = "sigmoid"
    ipo = "ipo"
    orpo = "orpo"
    simpo = "simpo"
    kto_pair = "kto_pair"


class Reference(Enum):
    auto = "auto"
    cached = "cached"
    adapter_off = "adapter_off"
    none = "none"


# Losses that compare the answers' likelihoods with each other, not with those under a reference.
WITHOUT_REFERENCE = (PreferenceLoss.orpo, PreferenceLoss.simpo)
# Losses that are a probability of the label, of which a share can be taken to be wrong.
SMOOTHED = (PreferenceLoss.sigmoid, PreferenceLoss.simpo)


@schema
class DpoTask(Task):
    """Trains on pairs of answers, one preferred to the other (data.record_type=preference)."""

    loss: PreferenceLoss = PreferenceLoss.sigmoid
    """sigmoid: DPO (Rafailov et al., 2023); ipo (Azar et al., 2023); orpo (Hong et al., 2024); simpo (Meng et al.,
    2024); kto_pair: KTO over pairs (Ethayarajh et al., 2024)."""
    beta: float = option(0.1, gt=0)
    """How much a log-ratio counts for: larger keeps closer to the reference. orpo: weight of the odds ratio."""
    label_smoothing: float = option(0.0, ge=0, lt=0.5)
    """sigmoid, simpo: share of the pairs that are taken to be labelled the wrong way round."""
    margin: float | None = option(None, ge=0)
    """simpo: by how much the chosen answer's reward should be over the other's."""
    reference: Reference = Reference.auto
    """cached: log-probs under the starting weights, computed once before training; adapter_off: the model without its
    adapter, in every step; none: for orpo and simpo; auto: adapter_off with an adapter, else what the loss needs."""

    def check(self) -> Iterator[Problem]:
        if self.label_smoothing and self.loss not in SMOOTHED:
            accepted = "0, or loss=sigmoid or simpo"
            yield Problem(
                "label_smoothing", f"is not used by loss={self.loss.value}", self.label_smoothing, accepted=accepted
            )
        if (self.margin is not None) != (self.loss is PreferenceLoss.simpo):
            reason = "is not used by" if self.margin is not None else "is needed by"
            accepted = "null" if self.margin is not None else "0 or more; about beta / 2 is usual"
            yield Problem("margin", f"{reason} loss={self.loss.value}", value=self.margin, accepted=accepted)
        is_free = self.loss in WITHOUT_REFERENCE
        if self.reference is not Reference.auto and is_free != (self.reference is Reference.none):
            accepted = "auto, none" if is_free else "auto, cached, adapter_off"
            reason = f"does not go with loss={self.loss.value}"
            yield Problem("reference", reason, value=self.reference, accepted=accepted)

    def reference_with(self, *, adapter: bool) -> Reference:
        """The reference of a run with or without an adapter."""
        if self.reference is not Reference.auto:
            return self.reference
        if self.loss in WITHOUT_REFERENCE:
            return Reference.none
        return Reference.adapter_off if adapter else Reference.cached
