"""Objects of a user for every kind of plug-in, which tests name as `tests.support.plug_ins:NAME`."""

from collections.abc import Iterator, Sequence

from maxhydra import Options, Problem, option, schema
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource, hold_out


@schema
class CountOptions(Options):
    """Settings of `counting`."""

    records: int = option(64, ge=4)
    """Number of records."""
    word: str = "one"
    """Text of the records."""
    step: int = option(1, ge=1)
    """Difference of the numbers in a record."""

    def check(self) -> Iterator[Problem]:
        if self.step >= self.records:
            yield Problem("step", f"is not under records={self.records}", self.step)


class Counts:
    """Records of a word and a number."""

    groups = None

    def __init__(self, options: CountOptions):
        self.options = options

    def __len__(self) -> int:
        return self.options.records

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [{"text": f"{self.options.word} {self.options.step * int(index)} " * 8} for index in indices]

    def location(self, index: int) -> str:
        return f"count {index}"


def counting(corpus: Corpus, data: Data, spec: RowSpec, options: CountOptions) -> RecordSource:
    """A data source."""
    return hold_out(Counts(options), corpus.eval_fraction)
