"""Preference pairs about images: messages with content parts {"type": "image"}, and a column with the images in order.

Chosen and rejected have the same images, mostly those of the prompt. A row also has a column `images`, as that of
image_chat; both completions of a pair use it. Pairs that are longer than a row are invalid: without their beginning,
images would belong to the wrong placeholders.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.config.schema.vision import Vision
from maxhydra.data.image_tokens import with_markers
from maxhydra.data.record_types import Rejected, first_rejection
from maxhydra.data.record_types._images import RecordImages
from maxhydra.data.record_types.preference import Pair, Preference
from maxhydra.data.records import Record
from maxhydra.data.rows import Document, Row


class Example(NamedTuple):
    """A pair with the pixels of its images."""

    pair: Pair
    images: np.ndarray


@dataclasses.dataclass(frozen=True)
class ImagePreference(Preference):
    images: RecordImages

    def _example(self, record: Record) -> Any:
        images = self.images.read(record)
        if isinstance(images, Rejected):
            return images
        pair = super()._example({**record, self._column("images"): images})
        return (
            pair if isinstance(pair, Rejected) else Example(pair, self.images.pixels(images, self.images.max_squares))
        )

    def _column(self, role: str) -> str:
        return self.corpus.columns.get(role, role)

    def _documents(self, record: Record) -> list[Any]:
        names = [self._column(role) for role in ("prompt", "chosen", "rejected")]
        conversations = {name: record[name] for name in names if isinstance(record.get(name), (list, tuple))}
        marked = {name: with_markers(messages) for name, messages in conversations.items()}
        documents = super()._documents({**record, **marked})
        if first_rejection(documents):
            return documents
        return [self.images.insert(document, record[self._column("images")]) for document in documents]

    def _fit(self, chosen: Document, rejected: Document) -> Any:
        longest = max(chosen.num_targets, rejected.num_targets)
        if longest > self.seq_len:
            return Rejected(f"has {longest + 1} tokens, more than train.seq_len={self.seq_len}")
        return Pair(chosen, rejected)

    def row(self, example: Any, seq_len: int) -> Row:
        return {**super().row(example.pair, seq_len), "images": example.images}


def build(corpus: Corpus, data: Data, seq_len: int, vision: Vision | None = None) -> ImagePreference:
    images = RecordImages.of(corpus, data, vision)
    return ImagePreference(corpus, data, images.tokenizer(), seq_len, images)
