"""Numbers of the server in memory that its processes share: each writes its own row, and all read the sums."""

from collections.abc import Iterable, MutableSequence
from typing import TypeVar

from maxhydra.record.processes import spawn_context

# Current amounts, which are zero again when a process has ended.
GAUGES = ("connections", "sequences", "pooling", "large_bytes")
FINISHES = ("stop", "length", "cancelled", "error")
STATUSES = range(100, 600)
Name = TypeVar("Name", str, int)
# Prompts so far, whose numbers determine the seeds of requests without one.
PROMPTS = "prompts"
COLUMNS: dict[str | int, int] = {name: column for column, name in enumerate((*GAUGES, PROMPTS, *FINISHES, *STATUSES))}


class Counters:
    """The numbers of one process, and their sums over all. Without locks: an increment is written before sums are read.

    Used by one thread of each process.
    """

    def __init__(self, values: MutableSequence[int] | None = None, row: int = 0):
        """`values`: of all processes; by default there is one."""
        self._values = [0] * len(COLUMNS) if values is None else values
        self.is_local = values is None
        """Whether there is only this process, which is the engine's."""
        self.row, self.num_rows = row, len(self._values) // len(COLUMNS)
        self._start = row * len(COLUMNS)

    @classmethod
    def shared(cls, rows: int) -> "Counters":
        """The first of several processes, all of which this one starts."""
        return cls(spawn_context.RawArray("q", rows * len(COLUMNS)))  # type: ignore[arg-type]

    def of(self, row: int) -> "Counters":
        """The counters of another process."""
        return Counters(self._values, row)

    def add(self, name: str | int, amount: int = 1) -> int:
        """Change a number of this process; return the sum over all."""
        self._values[self._start + COLUMNS[name]] += amount
        return self.total(name)

    def own(self, name: str | int) -> int:
        """Return the number of this process."""
        return self._values[self._start + COLUMNS[name]]

    def least(self, name: str | int) -> int:
        """Return the smallest number of a process."""
        return min(self._values[COLUMNS[name] :: len(COLUMNS)])

    def total(self, name: str | int) -> int:
        """Return the sum over all processes."""
        return sum(self._values[COLUMNS[name] :: len(COLUMNS)])

    def totals(self, names: Iterable[Name]) -> dict[Name, int]:
        """Return the sums that are not zero, by name."""
        return {name: total for name in names if (total := self.total(name))}

    def clear_gauges(self) -> None:
        """Reset the current amounts of this process, which has ended."""
        for name in GAUGES:
            self._values[self._start + COLUMNS[name]] = 0
