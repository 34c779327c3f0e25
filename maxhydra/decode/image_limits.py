"""Which requests with images an engine can serve."""

import dataclasses

import numpy as np

from maxhydra.config.schema.decode import CacheDtype
from maxhydra.config.schema.model import Model
from maxhydra.data.image_tokens import image_sizes
from maxhydra.decode.request import Request

# Bytes of a number in a cache, and in the compute dtypes; auto is the compute dtype.
CACHE_BYTES = {CacheDtype.float32: 4, CacheDtype.bfloat16: 2, CacheDtype.int8: 1, CacheDtype.float8: 1}


@dataclasses.dataclass(frozen=True)
class ImageLimits:
    """Requests with images are prefilled in one call, in which the tokens of an image see each other."""

    model: Model
    prefill_chunk: int
    cache_dtype: CacheDtype

    def find_problem(self, request: Request) -> str | None:
        """Return why a request cannot be served; None if it can."""
        vision, images = self.model.vision, request.images
        if vision.num_layers is None:
            return None if images is None else "the model takes no images: choose one with model.vision"
        if images is not None and images.shape[1:] != vision.image_shape:
            return f"images have shape {images.shape[1:]}, expected {vision.image_shape}"
        count, expected = (0, 0) if images is None else (len(images), self._num_tokens(images))
        num_tokens = sum(map(request.prompt.count, vision.placeholders))
        if num_tokens != expected:
            return f"the prompt has {num_tokens} image tokens, but {count} images, which have {expected}"
        if images is None:
            return None
        if len(request.prompt) > self.prefill_chunk:
            return (
                f"the prompt with images has {len(request.prompt)} tokens, more than one prefill call of "
                f"{self.prefill_chunk}: shorten it, or raise task.engine.prefill_chunk"
            )
        if vision.bidirectional and self._is_rounded:
            return f"images are not supported by task.engine.cache_dtype={self.cache_dtype.value}: set auto"
        return None

    def position_lag(self, request: Request) -> int:
        """How many positions fewer than tokens the images of a request take; negative for videos with large steps."""
        if request.images is None or not self.model.has_axis_positions:
            return 0
        return self._count_lag(np.array(request.prompt), request.images)

    def _count_lag(self, tokens: np.ndarray, images: np.ndarray) -> int:
        """Tokens of images and of the audio of videos, less their positions as in layers/image_positions.py."""
        vision = self.model.vision
        sizes = image_sizes(images, vision)
        counts = sizes.prod(axis=1)
        starts = np.flatnonzero(np.isin(tokens, vision.placeholders))[np.cumsum(counts) - counts]
        # Tokens of videos and of their audio; False stands for those outside of the prompt.
        is_of_video, is_track = (np.append(each, False) for each in self._video_tokens(tokens))
        num_audio = np.cumsum(is_track)
        total = time = taken = first = 0
        for start, count, longest in zip(starts.tolist(), counts.tolist(), sizes.max(axis=1).tolist(), strict=True):
            is_later = vision.step_positions is not None and is_of_video[start] and is_of_video[start - 1]
            time, first = (time + (vision.step_positions or 0), first) if is_later else (0, start)
            total -= taken if is_later else 0
            end = start + count
            last = end + np.argmin(is_of_video[end:]) - 1
            taken = int(num_audio[last] - num_audio[first]) if is_track[end] else max(time + 1, longest)
            total += taken
        return int(counts.sum() + num_audio[-1]) - total

    def _video_tokens(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether tokens are of videos or of their audio, which directly follows them, and whether of the audio."""
        is_video, is_audio = tokens == self.model.vision.video_id, tokens == self.model.video_audio_id
        index, is_media = np.arange(len(tokens)), is_video | is_audio
        others = np.maximum.accumulate(np.where(is_media, -1, index))
        is_track = is_audio & (np.maximum.accumulate(np.where(is_video, index, -1)) > others)
        return is_video | is_track, is_track

    def _num_tokens(self, images: np.ndarray) -> int:
        return int(image_sizes(images, self.model.vision).prod(axis=1).sum())

    @property
    def _is_rounded(self) -> bool:
        """Whether the cache holds less than the computed keys and values."""
        compute = 4 if self.model.dtypes.compute.value == "float32" else 2
        return CACHE_BYTES.get(self.cache_dtype, compute) < compute
