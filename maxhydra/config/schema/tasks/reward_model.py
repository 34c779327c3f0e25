"""Fields of task=reward_model."""

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task


class RewardLoss(Enum):
    bradley_terry = "bradley_terry"
    regression = "regression"


@schema
class RewardModelTask(Task):
    """Trains a reward model, which scores a completion at its last token (model.head=score)."""

    trains_mtp: ClassVar[bool] = False

    loss: RewardLoss = RewardLoss.bradley_terry
    """bradley_terry: -log sigmoid(chosen - rejected) of pairs (data.record_type=preference; Bradley and Terry, 1952),
    with the margin in data.columns.margin subtracted from the difference, if there is one; regression: squared error of
    scored completions (data.record_type=scored)."""
    centering: float = option(0.0, ge=0)
    """bradley_terry: weight of (chosen + rejected)^2, which keeps the rewards around 0 (Eisenstein et al., 2023)."""

    def check(self) -> Iterator[Problem]:
        if self.centering and self.loss is RewardLoss.regression:
            yield Problem("centering", "is not used by loss=regression", value=self.centering, accepted="0")
