"""Generated tones with questions about their note (data.record_type=audio_chat).

Held-out records have other random numbers than those to train on.
"""

import dataclasses
from collections.abc import Sequence

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.audio.tones import tone_example
from maxhydra.data.records import BadRecord, Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSlice, RecordSource

# Seed of the tones.
SEED = 5678
DEFAULT_RECORDS = 20_000
SAMPLING_RATE = 16000


@dataclasses.dataclass(frozen=True)
class Tones:
    """Records by index; a record is a function of its index."""

    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [make_record(int(index)) for index in indices]

    def location(self, index: int) -> str:
        return f"tone {index}"

    @property
    def groups(self) -> list[int] | None:
        return None


def make_record(index: int) -> Record:
    """The tone, question and response of an index."""
    example = tone_example(SEED, index, sampling_rate=SAMPLING_RATE)
    parts = [{"type": "audio"}, {"type": "text", "text": example.question}]
    user, assistant = {"role": "user", "content": parts}, {"role": "assistant", "content": example.reply}
    clip = {"array": example.samples, "sampling_rate": SAMPLING_RATE}
    return {"messages": [user, assistant], "audios": [clip], "answer": example.reply}


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    count = corpus.problems or DEFAULT_RECORDS
    records = Tones(count)
    held_out = max(1, round(count * corpus.eval_fraction))
    return RecordSource(train=RecordSlice(records, held_out, count), evaluation=RecordSlice(records, 0, held_out))
