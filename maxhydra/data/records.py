"""Records: what lies in a source, before any tokenizer has seen it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from maxhydra.config import ConfigError, Problem

# A record as its file has it: columns by name.
Record = dict[str, Any]

# Where a reader stands: JSON, and enough to go on from in another process.
Cursor = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used: where it lies (file and index), and why not."""

    location: str
    reason: str


def bad_record_error(bad_record: BadRecord) -> ConfigError:
    """The end of a run under data.on_error=raise."""
    hint = "mend it, or leave such records out with data.on_error=skip"
    return ConfigError(Problem("data", bad_record.reason, value=bad_record.location, hint=hint))


class Records(Protocol):
    """Records by index."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        """The records at some indices; safe to call from several threads."""
        ...

    def location(self, index: int) -> str:
        """File and index of a record, for a message."""
        ...

    @property
    def groups(self) -> list[int] | None:
        """Sizes of the runs of records that can only be read together, or None where each can be read alone."""
        ...


class RecordStream(Protocol):
    """Records that can only be read in order, from a cursor on."""

    def iter_from(
        self, cursor: Cursor | None, *, share: int, shares: int
    ) -> Iterator[tuple[Record | BadRecord, Cursor]]:
        """One epoch of a share: each record with the cursor after it, None being the epoch's start.

        A cursor's `number` counts the records of the share that lie before it.
        """
        ...

    def location(self, number: int) -> str:
        """Name and number of a record (its cursor's), for a message."""
        ...
