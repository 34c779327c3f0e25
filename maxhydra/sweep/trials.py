"""Sources of trials: propose the next job, and record the results of jobs that ended."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from maxhydra.launch.base import Trial


class TrialStatus(Enum):
    """How a trial ended."""

    finished = "finished"
    failed = "failed"
    pruned = "pruned"


class TrialSource(Protocol):
    """Proposes trials and records their results. All of its state survives the process."""

    def unfinished(self) -> list[Trial]:
        """Trials that were proposed before and have no recorded result."""
        ...

    def next_trial(self) -> Trial | None:
        """Propose a new trial; None after the last one."""
        ...

    def report(self, trial: Trial, step: int, value: float) -> bool:
        """Report the objective at a step; returns True if the trial should be pruned."""
        ...

    def record_result(self, trial: Trial, status: TrialStatus, values: Sequence[float]) -> None:
        """Record how a trial ended, with its objective values."""
        ...

    def counts(self) -> Mapping[TrialStatus, int]:
        """Number of ended trials by status."""
        ...

    def summary(self) -> str:
        """Human-readable summary of all results."""
        ...


class ListedTrials:
    """The fixed list of jobs of a grid sweep. Their results are stored in their run folders."""

    def __init__(self, trials: Sequence[Trial], done: Mapping[int, TrialStatus]):
        """`done` maps the numbers of ended trials to their status."""
        self._unfinished = [trial for trial in trials if trial.number not in done]
        self._statuses = dict(done)

    def unfinished(self) -> list[Trial]:
        return self._unfinished

    def next_trial(self) -> Trial | None:
        return None

    def report(self, trial: Trial, step: int, value: float) -> bool:
        return False

    def record_result(self, trial: Trial, status: TrialStatus, values: Sequence[float]) -> None:
        self._statuses[trial.number] = status

    def counts(self) -> Mapping[TrialStatus, int]:
        return {status: list(self._statuses.values()).count(status) for status in TrialStatus}

    def summary(self) -> str:
        return format_counts(self.counts())


def format_counts(counts: Mapping[TrialStatus, int]) -> str:
    return ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
