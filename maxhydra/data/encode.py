"""From records to examples: formatting, shape and tokenizer, in the training process's threads or in workers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from maxhydra.data.record_types import RecordType, Rejected
from maxhydra.data.records import BadRecord, Record


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What came of a chunk: examples, the places they fill in rows, and the records that could not be used."""

    examples: list[Any]
    places: int
    bad_records: list[BadRecord]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Reads a chunk and makes examples of it. A pure function of the payload."""

    read: Callable[[Any], Sequence[Record | BadRecord]]
    location: Callable[[Any, int], str]
    """Where the k-th record of a payload lies."""
    formatting: Callable[[Record], Record] | None
    shape: RecordType
    longest: int
    """Places that a row has; an example without packing fills one row whatever its length."""

    def __call__(self, payload: Any) -> Encoded:
        bad_records: list[BadRecord] = []
        records: list[Record] = []
        numbers: list[int] = []
        for number, found in enumerate(self.read(payload)):
            if isinstance(found, BadRecord):
                bad_records.append(found)
                continue
            try:
                records.append(self.formatting(found) if self.formatting else found)
                numbers.append(number)
            except Exception as error:  # a user's function may raise anything, and the record should be named
                reason = f"data.formatting raised {type(error).__name__}: {error}"
                bad_records.append(BadRecord(self.location(payload, number), reason))
        examples = []
        for number, example in zip(numbers, self.shape.encode(records), strict=True):
            if isinstance(example, Rejected):
                bad_records.append(BadRecord(self.location(payload, number), example.reason))
            else:
                examples.append(example)
        places = sum(example.places for example in examples) if self.shape.packs else len(examples) * self.longest
        return Encoded(examples, places, bad_records)
