"""What every task is given, and what it gives back."""

import dataclasses

from maxhydra.config import Config
from maxhydra.record import RunDirectory
from maxhydra.runtime import Machine


@dataclasses.dataclass(frozen=True)
class Job:
    """A valid config on a started machine, with a folder to write to. `run` is None for tasks that only print."""

    config: Config
    choices: dict[str, str]
    machine: Machine
    run: RunDirectory

    @property
    def is_main(self) -> bool:
        """Whether this process writes: one of each run does."""
        return self.machine.process_index == 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a task ended: a run status, why, its metrics, and facts worth keeping in run.json."""

    status: str
    reason: str
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, object] = dataclasses.field(default_factory=dict)
