"""What every task is given, and what it gives back."""

import dataclasses

from maxhydra.config import Config
from maxhydra.record import RunDirectory
from maxhydra.runtime import Machine


@dataclasses.dataclass(frozen=True)
class Job:
    """A valid config on a started machine, and the run's folder; a task that only prints leaves it untouched."""

    config: Config
    choices: dict[str, str]
    machine: Machine
    run: RunDirectory


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a task ended: a run status, why, its metrics, and facts worth keeping in run.json."""

    status: str
    reason: str
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, object] = dataclasses.field(default_factory=dict)
