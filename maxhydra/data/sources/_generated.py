"""Records that are functions of their index. Held-out records come first."""

import dataclasses
from collections.abc import Callable, Sequence

from maxhydra.config.schema.data import Corpus
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.sources import RecordSlice, RecordSource

DEFAULT_RECORDS = 20_000


@dataclasses.dataclass(frozen=True)
class GeneratedRecords:
    """Records by index."""

    count: int
    make: Callable[[int], Record]
    noun: str
    """Name of a record in messages."""

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [self.make(int(index)) for index in indices]

    def location(self, index: int) -> str:
        return f"{self.noun} {index}"

    @property
    def groups(self) -> list[int] | None:
        return None


def generated_source(corpus: Corpus, make: Callable[[int], Record], noun: str) -> RecordSource:
    """A source of `data.problems` records, of which the share `data.eval_fraction` is held out."""
    count = corpus.problems or DEFAULT_RECORDS
    records = GeneratedRecords(count, make, noun)
    held_out = max(1, round(count * corpus.eval_fraction))
    return RecordSource(train=RecordSlice(records, held_out, count), evaluation=RecordSlice(records, 0, held_out))
