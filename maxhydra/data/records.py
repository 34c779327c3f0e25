"""Records: the raw items of a source, before any tokenizer has seen them.

The layers of the input pipeline, from the bottom up:

- `Record`: one dict of columns as a file stores it. `Records` reads them by index, `RecordStream` only in order.
- `Chunk`: up to 128 records of one epoch, the unit of work of a reader thread or worker process. `Chunks` iterates
  over them from a cursor; an `Encoder` turns one into `Encoded` examples, most of which are `Document`s.
- `Row`: one training sequence of `seq_len` tokens. `Rows` are rows by index: `PackedRows` hold several documents per
  row, `ContiguousRows` are cut from one long token stream.
- `Stream`: an endless sequence of rows from one share of a source, with a resumable state.
- `StreamSet`: the streams that this process reads; it yields the rows of each batch.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

from maxhydra.config import ConfigError, Problem

# One record: columns by name.
Record = dict[str, Any]

# Position of a reader: JSON that another process can resume from.
Cursor = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used: its location (file and index) and the reason."""

    location: str
    reason: str


def bad_record_error(bad_record: BadRecord) -> ConfigError:
    """Error that stops a run under data.on_error=raise."""
    hint = "fix the record, or set data.on_error=skip to skip bad records"
    return ConfigError(Problem("data", bad_record.reason, value=bad_record.location, hint=hint))


class Records(Protocol):
    """Records with random access by index."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        """Read the records at the given indices; safe to call from several threads."""
        ...

    def location(self, index: int) -> str:
        """File and index of a record, for error messages."""
        ...

    @property
    def groups(self) -> list[int] | None:
        """Sizes of the runs of records that can only be read together; None if each can be read alone."""
        ...


class RecordStream(Protocol):
    """Records that can only be read in order, starting at a cursor."""

    def iter_from(
        self, cursor: Cursor | None, *, share: int, shares: int
    ) -> Iterator[tuple[Record | BadRecord, Cursor]]:
        """Iterate over one epoch of a share: each record with the cursor after it; None starts the epoch.

        A cursor's `number` counts the records of the share before it.
        """
        ...

    def location(self, number: int) -> str:
        """Name of the stream and number of a record (its cursor's), for error messages."""
        ...


def need(package: str, setting: str, *, extra: str = "data") -> ModuleType:
    """Import an optional package, or raise an error that says how to install it.

    `setting` is the `key=value` that requires it, `extra` the extra of maxhydra that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.split(".")[0]:
            raise
        path, value = setting.split("=")
        reason = f"needs the package {package.split('.')[0]}, which is not installed"
        raise ConfigError(Problem(path, reason, value=value, hint=f"pip install 'maxhydra[{extra}]'")) from None
