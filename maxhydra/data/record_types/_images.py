"""Images and videos of a record: columns with one or several of them, in the order of the parts of its messages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.audio import Audio
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.config.schema.vision import Vision
from maxhydra.data.audio.tokens import Clips, stack_clips
from maxhydra.data.image_tokens import ImageTokenizer, insert_images, join_pixels
from maxhydra.data.images import ProcessedImage
from maxhydra.data.media import MediaError
from maxhydra.data.record_types import Rejected, column_of
from maxhydra.data.records import Record
from maxhydra.data.rows import Document
from maxhydra.data.tokenizers import load_tokenizer
from maxhydra.data.video_tokens import VideoAudio, has_videos, order_media, read_media


@dataclasses.dataclass(frozen=True)
class RecordImages:
    """Reads the images of records for one model."""

    corpus: Corpus
    data: Data
    vision: Vision
    audio: VideoAudio | None = None
    """How the audio of videos is read; None: videos have no audio."""

    @classmethod
    def of(cls, corpus: Corpus, data: Data, vision: Vision | None, audio: Audio | None = None) -> "RecordImages":
        if vision is None or vision.num_layers is None:
            reason, accepted = "needs a model that takes images", "a model with model.vision"
            raise ConfigError(Problem("data.record_type", reason, value=corpus.record_type, accepted=accepted))
        return cls(corpus, data, vision, None if audio is None else VideoAudio(audio, data.max_seconds))

    def tokenizer(self) -> ImageTokenizer:
        """The tokenizer of data, with markers of images as placeholders."""
        return ImageTokenizer(load_tokenizer(self.data), self.vision)

    def read(self, record: Record, messages: Any = ()) -> Any:
        """The images and videos of a record in the order of the parts of messages, or a Rejected."""
        videos = _listed(record.get(self.corpus.columns.get("videos", "videos")))
        is_optional = has_videos(messages) and self.corpus.columns.get("images", "images") not in record
        images = [] if is_optional else column_of(record, self.corpus, "images")
        if isinstance(images, Rejected):
            return images
        try:
            sources = order_media(messages, _listed(images), videos)
            read = read_media(sources, self.vision, load_tokenizer(self.data).encode, self.audio)
        except MediaError as error:
            return Rejected(str(error))
        # Each step of a video is an image.
        count = sum(1 if image.ids is None else len(image.pixels) for image in read)
        if count > self.data.max_images:
            return Rejected(f"has {count} images, more than data.max_images={self.data.max_images}")
        if (count := sum(image.clip is not None for image in read)) > self.data.max_clips:
            return Rejected(f"has {count} videos with audio, more than data.max_clips={self.data.max_clips}")
        return read

    def insert(self, document: Document, images: Sequence[ProcessedImage]) -> Any:
        """The document with the tokens of its images, or a Rejected."""
        try:
            tokens, index = insert_images(document.tokens, images, self.vision)
        except MediaError as error:
            return Rejected(str(error))
        assert document.weights is not None
        # A model never has to generate the tokens of images, nor of the audio of videos.
        is_encoded = np.isin(tokens, self.vision.placeholders)
        if self.audio is not None:
            is_encoded |= tokens == self.audio.section.placeholder_id
        weights = np.where(is_encoded, 0, document.weights[index])
        return dataclasses.replace(document, tokens=tokens, weights=weights)

    @property
    def max_squares(self) -> int:
        """Squares of image_size of a row."""
        return self.data.max_images * self.vision.tiles.squares

    def pixels(self, images: Sequence[ProcessedImage], squares: int) -> np.ndarray:
        """[squares, *vision.image_shape], zeros for squares that the images do not have."""
        pixels = np.zeros((squares, *self.vision.image_shape), np.float32)
        if (joined := join_pixels(images)) is not None:
            pixels[: len(joined)] = joined
        return pixels

    def clips(self, images: Sequence[ProcessedImage]) -> Clips | None:
        """The audio of data.max_clips videos, zeros for those that a record does not have; None without `audio`."""
        if self.audio is None:
            return None
        section, seconds = self.audio
        shape = (section.num_frames(seconds), section.num_bands)
        clips = [image.clip for image in images if image.clip is not None]
        return stack_clips(clips, count=self.data.max_clips, shape=shape)


def _listed(values: Any) -> list[Any]:
    """The values of a column with none, one or several."""
    return [] if values is None else list(values) if isinstance(values, (list, tuple)) else [values]
