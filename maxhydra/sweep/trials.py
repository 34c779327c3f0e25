"""What to try next, and what came of it: the side of a sweep that decides."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from maxhydra.launch.base import Proposal


class TrialStatus(Enum):
    """How a job ended."""

    finished = "finished"
    failed = "failed"
    pruned = "pruned"


class Proposals(Protocol):
    """Where jobs come from. Everything that it is told survives the process."""

    def unfinished(self) -> list[Proposal]:
        """Jobs that are known already, and not the end of them."""
        ...

    def next(self) -> Proposal | None:
        """A new job; None when there will be no more."""
        ...

    def report(self, proposal: Proposal, step: int, value: float) -> bool:
        """What the objective is at a step; True where the job should end for it."""
        ...

    def tell(self, proposal: Proposal, fate: TrialStatus, values: Sequence[float]) -> None:
        """How a job ended, with its objectives."""
        ...

    def counts(self) -> Mapping[TrialStatus, int]:
        """Jobs that have ended, by how."""
        ...

    def summary(self) -> str:
        """What came of all of it, for a person."""
        ...


class ListedProposals:
    """Jobs that are all known, as those of a plain sweep are. What became of each stands in its own folder."""

    def __init__(self, jobs: Sequence[Proposal], done: Mapping[int, TrialStatus]):
        """`done`: numbers of the jobs that are over."""
        self._left = [job for job in jobs if job.number not in done]
        self._fates = dict(done)

    def unfinished(self) -> list[Proposal]:
        return self._left

    def next(self) -> Proposal | None:
        return None

    def report(self, proposal: Proposal, step: int, value: float) -> bool:
        return False

    def tell(self, proposal: Proposal, fate: TrialStatus, values: Sequence[float]) -> None:
        self._fates[proposal.number] = fate

    def counts(self) -> Mapping[TrialStatus, int]:
        return {fate: list(self._fates.values()).count(fate) for fate in TrialStatus}

    def summary(self) -> str:
        return told(self.counts())


def told(counts: Mapping[TrialStatus, int]) -> str:
    return ", ".join(f"{count} {fate.value}" for fate, count in counts.items() if count)
