"""Conversations with images: messages with content parts {"type": "image"}, and a column with the images in order.

An image is a path, a data URL, the bytes of a file, or {bytes, path}. A record fills a row, which also has a column
`images`: the pixels of data.max_images images or of their tiles, zeros for those that it does not have. The loss is
that of conversations and never counts the tokens of images.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.config.schema.vision import Vision
from maxhydra.data.chat import compile_chat_template
from maxhydra.data.image_tokens import with_markers
from maxhydra.data.record_types import Rejected, column_of
from maxhydra.data.record_types._images import RecordImages
from maxhydra.data.record_types.chat import Chat
from maxhydra.data.record_types.preference import fit_document, has_loss, padded_columns
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row


class Example(NamedTuple):
    """A conversation with the pixels of its images."""

    document: Document
    images: np.ndarray


@dataclasses.dataclass(frozen=True)
class ImageChat(Chat):
    images: RecordImages
    seq_len: int
    packs = False

    def _example(self, record: Record) -> Any:
        messages = column_of(record, self.corpus, "messages")
        images = messages if isinstance(messages, Rejected) else self.images.read(record)
        if isinstance(images, Rejected):
            return images
        document = super()._example({**record, self.corpus.columns.get("messages", "messages"): with_markers(messages)})
        document = document if isinstance(document, Rejected) else self.images.insert(document, images)
        document = document if isinstance(document, Rejected) else self._fit(document)
        return document if isinstance(document, Rejected) else Example(document, self.images.pixels(images))

    def _fit(self, document: Document) -> Any:
        """Keep the beginning of a conversation that is longer than a row, or reject it."""
        fitting = fit_document(document, self.data, self.seq_len, start=lambda _: 0)
        if fitting is document or isinstance(fitting, Rejected) or has_loss(fitting):
            return fitting
        return Rejected("has no text of the assistant within train.seq_len")

    def row(self, example: Any, seq_len: int) -> Row:
        return {**padded_columns(example.document, seq_len), "images": example.images}


def build(corpus: Corpus, data: Data, seq_len: int, vision: Vision | None = None) -> ImageChat:
    images = RecordImages.of(corpus, data, vision)
    return ImageChat(corpus, data, compile_chat_template(images.tokenizer()), images, seq_len)
