"""Conversations with images: messages with content parts {"type": "image"}, and a column with the images in order.

An image is a path, a data URL, the bytes of a file, or {bytes, path}. Parts {"type": "video"} are videos, which are in
the part under `video`, or in a column `videos`; each step of a video counts as an image. A record fills a row, or
shares it with others if data.packing.method says so. A row also has a column `images`: the pixels of data.max_images
images or of their tiles, zeros for those that it does not have. If videos are read with their audio, a row also has the
columns of record_type=audio_chat. The loss is that of conversations and never counts the tokens of images and audio.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.data import Corpus, Data, PackingMethod
from maxhydra.config.schema.vision import Vision
from maxhydra.data.audio.tokens import Clips
from maxhydra.data.chat import compile_chat_template
from maxhydra.data.image_tokens import IMAGE_PARTS, with_markers
from maxhydra.data.record_types import Rejected, column_of
from maxhydra.data.record_types._images import RecordImages
from maxhydra.data.record_types.chat import Chat
from maxhydra.data.record_types.preference import fit_document, has_loss, padded_columns
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row
from maxhydra.data.video_tokens import VIDEO_PARTS


class Example(NamedTuple):
    """A conversation with the pixels of its images."""

    document: Document
    images: np.ndarray
    clips: Clips | None
    """Audio of its videos; None: rows have none."""


@dataclasses.dataclass(frozen=True)
class ImageChat(Chat):
    images: RecordImages
    seq_len: int

    @property
    def packs(self) -> bool:  # type: ignore[override]
        return self.data.packing.method not in (PackingMethod.auto, PackingMethod.none)

    def _example(self, record: Record) -> Any:
        messages = column_of(record, self.corpus, "messages")
        images = messages if isinstance(messages, Rejected) else self.images.read(record, messages)
        if isinstance(images, Rejected):
            return images
        marked = with_markers(messages, (*IMAGE_PARTS, *VIDEO_PARTS))
        document = super()._example({**record, self.corpus.columns.get("messages", "messages"): marked})
        document = document if isinstance(document, Rejected) else self.images.insert(document, images)
        document = document if isinstance(document, Rejected) else self._fit(document)
        if isinstance(document, Rejected):
            return document
        if not self.packs:
            return Example(document, self.images.pixels(images, self.images.max_squares), self.images.clips(images))
        pixels = self.images.pixels(images, sum(len(image.pixels) for image in images))
        return dataclasses.replace(document, text_bytes=None, images=pixels, max_images=self.images.max_squares)

    def _fit(self, document: Document) -> Any:
        """Keep the beginning of a conversation that is longer than a row, or reject it.

        Without its end, images of a packed row would belong to placeholders of the next conversation.
        """
        if self.packs and document.num_targets > self.seq_len:
            return Rejected(f"has {len(document.tokens)} tokens, more than train.seq_len={self.seq_len}")
        return fit_conversation(document, self.data, self.seq_len)

    def row(self, example: Any, seq_len: int) -> Row:
        clips = {} if example.clips is None else dict(zip(("audio", "audio_lengths"), example.clips, strict=True))
        return {**padded_columns(example.document, seq_len), "images": example.images, **clips}


def fit_conversation(document: Document, data: Data, seq_len: int) -> Any:
    """Keep the beginning of a conversation that is longer than a row, or reject it."""
    fitting = fit_document(document, data, seq_len, start=lambda _: 0)
    if fitting is document or isinstance(fitting, Rejected) or has_loss(fitting):
        return fitting
    return Rejected("has no text of the assistant within train.seq_len")


def build(
    corpus: Corpus, data: Data, seq_len: int, vision: Vision | None = None, audio: Audio | None = None
) -> ImageChat:
    images = RecordImages.of(corpus, data, vision, audio)
    return ImageChat(corpus, data, compile_chat_template(images.tokenizer()), images, seq_len)
