"""Conversations with images: messages with content parts {"type": "image"}, and a column with the images in order.

An image is a path, a data URL, the bytes of a file, or {bytes, path}. A record fills a row, which also has a column
`images`: the pixels of data.max_images images or of their tiles, zeros for those that it does not have. The loss is
that of conversations and never counts the tokens of images.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.config.schema.vision import Vision
from maxhydra.data.chat import compile_chat_template
from maxhydra.data.image_tokens import ImageTokenizer, insert_images, join_pixels, read_images, with_markers
from maxhydra.data.images import ProcessedImage
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
        try:
            images = read_images(_as_list(images), self.vision)
            tokens, index = insert_images(document.tokens, images, self.vision)
        except MediaError as error:
            return Rejected(str(error))
        if len(images) > self.data.max_images:
            return Rejected(f"has {len(images)} images, more than data.max_images={self.data.max_images}")
        assert document.weights is not None
        # A model never has to generate the tokens of images.
        weights = np.where(tokens == self.vision.placeholder_id, 0, document.weights[index])
        document = self._fit(dataclasses.replace(document, tokens=tokens, weights=weights))
        return document if isinstance(document, Rejected) else Example(document, self._pixels(images))

    def _pixels(self, images: Sequence[ProcessedImage]) -> np.ndarray:
        """[data.max_images * squares of an image, *vision.image_shape], zeros for squares that a row does not have."""
        count = self.data.max_images * self.vision.tiles.squares
        pixels = np.zeros((count, *self.vision.image_shape), np.float32)
        if (joined := join_pixels(images)) is not None:
            pixels[: len(joined)] = joined
        return pixels

    def _fit(self, document: Document) -> Any:
        """Keep the beginning of a conversation that is longer than a row, or reject it."""
        fitting = fit_document(document, self.data, self.seq_len, start=lambda _: 0)
        if fitting is document or isinstance(fitting, Rejected) or has_loss(fitting):
            return fitting
        return Rejected("has no text of the assistant within train.seq_len")

    def row(self, example: Any, seq_len: int) -> Row:
        return {**padded_columns(example.document, seq_len), "images": example.images}


def _as_list(images: Any) -> list[Any]:
    return [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]


def build(corpus: Corpus, data: Data, seq_len: int, vision: Vision | None = None) -> ImageChat:
    if vision is None or vision.num_layers is None:
        reason, accepted = "needs a model that takes images", "a model with model.vision"
        raise ConfigError(Problem("data.record_type", reason, value="image_chat", accepted=accepted))
    template = compile_chat_template(ImageTokenizer(load_tokenizer(data), vision))
    return ImageChat(corpus, data, template, vision, seq_len)
