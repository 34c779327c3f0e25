"""Conversations with images: messages with content parts {"type": "image"}, and a column with the images in order.

An image is a path, a data URL, the bytes of a file, or {bytes, path}. A record fills a row, which also has a column
`images`: the pixels of data.max_images images, zeros for those that it does not have. The loss is that of
conversations and never counts the tokens of images.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.config.schema.vision import Vision
from maxhydra.data.chat import compile_chat_template
from maxhydra.data.image_tokens import ImageTokenizer, image_pixels, with_markers
from maxhydra.data.media import MediaError
from maxhydra.data.record_types import Rejected, column_of
from maxhydra.data.record_types.chat import Chat
from maxhydra.data.record_types.preference import fit_document, has_loss, padded_columns
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row
from maxhydra.data.tokenizers import load_tokenizer


class Example(NamedTuple):
    """A conversation with the pixels of its images."""

    document: Document
    images: np.ndarray


@dataclasses.dataclass(frozen=True)
class ImageChat(Chat):
    vision: Vision
    seq_len: int
    packs = False

    def _example(self, record: Record) -> Any:
        messages, images = (column_of(record, self.corpus, name) for name in ("messages", "images"))
        if rejection := next((value for value in (messages, images) if isinstance(value, Rejected)), None):
            return rejection
        document = super()._example({**record, self.corpus.columns.get("messages", "messages"): with_markers(messages)})
        if isinstance(document, Rejected):
            return document
        pixels = self._pixels(document, images)
        if isinstance(pixels, Rejected):
            return pixels
        document = fit_conversation(without_loss_on(self.vision.placeholder_id, document), self.data, self.seq_len)
        return document if isinstance(document, Rejected) else Example(document, pixels)

    def _pixels(self, document: Document, images: Any) -> Any:
        """Pixels [data.max_images, size, size, 3], or a Rejected."""
        images = [] if images is None else images if isinstance(images, (list, tuple)) else [images]
        count = np.count_nonzero(document.tokens == self.vision.placeholder_id) // self.vision.projector.tokens
        if count != len(images):
            return Rejected(f"has {len(images)} images, but {count} image parts in its messages")
        if count > self.data.max_images:
            return Rejected(f"has {count} images, more than data.max_images={self.data.max_images}")
        size = self.vision.image_size
        pixels = np.zeros((self.data.max_images, size, size, 3), np.float32)
        try:
            for number, image in enumerate(images):
                pixels[number] = image_pixels(image, self.vision)
        except MediaError as error:
            return Rejected(str(error))
        return pixels

    def row(self, example: Any, seq_len: int) -> Row:
        return {**padded_columns(example.document, seq_len), "images": example.images}


def without_loss_on(placeholder: int | None, document: Document) -> Document:
    """The document without loss on placeholders of media, which a model never has to generate."""
    assert document.weights is not None
    return dataclasses.replace(document, weights=np.where(document.tokens == placeholder, 0, document.weights))


def fit_conversation(document: Document, data: Data, seq_len: int) -> Any:
    """Keep the beginning of a conversation that is longer than a row, or reject it."""
    fitting = fit_document(document, data, seq_len, start=lambda _: 0)
    if fitting is document or isinstance(fitting, Rejected) or has_loss(fitting):
        return fitting
    return Rejected("has no text of the assistant within train.seq_len")


def build(corpus: Corpus, data: Data, seq_len: int, vision: Vision | None = None) -> ImageChat:
    if vision is None or vision.num_layers is None:
        reason, accepted = "needs a model that takes images", "a model with model.vision"
        raise ConfigError(Problem("data.record_type", reason, value="image_chat", accepted=accepted))
    template = compile_chat_template(ImageTokenizer(load_tokenizer(data), vision))
    return ImageChat(corpus, data, template, vision, seq_len)
