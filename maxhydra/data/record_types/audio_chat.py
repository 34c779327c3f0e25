"""Conversations with audio: messages with content parts {"type": "audio"}, and a column with the clips in order.

A clip is a path, a data URL, the bytes of a file, {bytes, path} or {array, sampling_rate}. A record fills a row, which
also has a column `audio`: the log-mel frames of data.max_clips clips, zeros for those that it does not have, and a
column `audio_lengths`. The loss is that of conversations and never counts the tokens of audio.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.audio.tokens import (
    AUDIO_PARTS,
    CLIP_MARKER,
    Clips,
    ClipTokenizer,
    clip_frames,
    placeholder_counts,
    stack_clips,
)
from maxhydra.data.chat import compile_chat_template
from maxhydra.data.image_tokens import with_markers
from maxhydra.data.media import MediaError
from maxhydra.data.record_types import Rejected, column_of, first_rejection
from maxhydra.data.record_types.chat import Chat
from maxhydra.data.record_types.image_chat import fit_conversation
from maxhydra.data.record_types.preference import padded_columns
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import load_tokenizer


class Example(NamedTuple):
    """A conversation with its clips."""

    document: Document
    clips: Clips


@dataclasses.dataclass(frozen=True)
class AudioChat(Chat):
    audio: Audio
    seq_len: int
    packs = False

    def _example(self, record: Record) -> Any:
        messages, clips = (column_of(record, self.corpus, name) for name in ("messages", "audios"))
        if rejection := first_rejection((messages, clips)):
            return rejection
        messages = with_markers(messages, AUDIO_PARTS, CLIP_MARKER)
        document = super()._example({**record, self.corpus.columns.get("messages", "messages"): messages})
        if isinstance(document, Rejected):
            return document
        clips = [] if clips is None else clips if isinstance(clips, (list, tuple)) else [clips]
        if len(clips) > self.data.max_clips:
            return Rejected(f"has {len(clips)} audio clips, more than data.max_clips={self.data.max_clips}")
        try:
            frames = [clip_frames(clip, self.audio, max_seconds=self.data.max_seconds) for clip in clips]
            document = self._expand(document, frames)
        except MediaError as error:
            return Rejected(str(error))
        document = fit_conversation(document, self.data, self.seq_len)
        if isinstance(document, Rejected):
            return document
        length = self.audio.num_frames(self.data.max_seconds)
        return Example(document, stack_clips(frames, count=self.data.max_clips, shape=(length, self.audio.num_bands)))

    def _expand(self, document: Document, frames: list[np.ndarray]) -> Document:
        """The document with as many placeholders as its clips have tokens, without loss on them."""
        assert document.weights is not None
        counts = placeholder_counts(document.tokens, [len(clip) for clip in frames], self.audio)
        tokens, weights = np.repeat(document.tokens, counts), np.repeat(document.weights, counts)
        # A model never has to generate the tokens of clips.
        weights = np.where(tokens == self.audio.placeholder_id, 0, weights)
        return dataclasses.replace(document, tokens=tokens, weights=weights)

    def row(self, example: Any, seq_len: int) -> Row:
        frames, lengths = example.clips
        return {**padded_columns(example.document, seq_len), "audio": frames, "audio_lengths": lengths}


def build(corpus: Corpus, data: Data, seq_len: int, audio: Audio | None = None) -> AudioChat:
    if audio is None or audio.num_layers is None:
        reason, accepted = "needs a model that takes audio", "a model with model.audio"
        raise ConfigError(Problem("data.record_type", reason, value="audio_chat", accepted=accepted))
    template = compile_chat_template(ClipTokenizer(load_tokenizer(data), audio))
    return AudioChat(corpus, data, template, audio, seq_len)
