"""Generated tones with questions about their note (data.record_type=audio_chat).

Held-out records have other random numbers than those to train on.
"""

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.audio.tones import tone_example
from maxhydra.data.records import Record
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSource
from maxhydra.data.sources._generated import generated_source

# Seed of the tones.
SEED = 5678
SAMPLING_RATE = 16000


def make_record(index: int) -> Record:
    """The tone, question and response of an index."""
    example = tone_example(SEED, index, sampling_rate=SAMPLING_RATE)
    parts = [{"type": "audio"}, {"type": "text", "text": example.question}]
    user, assistant = {"role": "user", "content": parts}, {"role": "assistant", "content": example.reply}
    clip = {"array": example.samples, "sampling_rate": SAMPLING_RATE}
    return {"messages": [user, assistant], "audios": [clip], "answer": example.reply}


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    return generated_source(corpus, make_record, "tone")
