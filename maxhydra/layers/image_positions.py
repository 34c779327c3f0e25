"""Places of image tokens in a sequence: their image, their index in it, and their positions of RoPE.

Positions have the axes time, row and column (Wang et al., 2024). All tokens of an image have one time, and the rows and
columns of its grid. Text continues one after the largest position of the token before it, which for an image is the
longer side of its grid. A step of a video is an image; the steps of one video may also share their rows and columns and
differ in time, and the audio of the video may be between them, a position for each of its tokens (Qwen3-Omni, 2025).
B batch, T tokens, I images.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class VideoSteps(NamedTuple):
    """Which tokens are of videos, and how many positions a step is behind the one before."""

    is_video_BT: jax.Array
    positions: int
    is_audio_BT: jax.Array | None = None
    """Tokens of audio. Those that follow a token of a video directly, or its audio, are audio of the video."""


class ImagePlaces(NamedTuple):
    """Where the tokens of images are."""

    image_BT: jax.Array
    """Images before a token; of an image token, the number of its image."""
    index_BT: jax.Array
    """Of an image token, its index in the image."""
    is_placed_BT: jax.Array
    """Whether a token is of an image, or of the audio of a video."""
    start_BT: jax.Array
    """Of a placed token, the index of the first token of its image or video."""
    offset_BT3: jax.Array
    """Of a placed token, its positions after that of the first token."""
    saved_BT: jax.Array
    """Tokens of the images and videos before a token, less the positions that they take."""

    @classmethod
    def of(cls, is_image_BT: jax.Array, sizes_BI2: jax.Array, steps: VideoSteps | None = None) -> "ImagePlaces":
        """`sizes_BI2`: rows and columns of tokens of each image, zeros for padding.

        With `steps`, images whose tokens directly follow each other in a video, or its audio, are steps of one video.
        """
        num_tokens_BI = jnp.prod(sizes_BI2, axis=-1)
        before_BT = jnp.cumsum(is_image_BT, axis=1) - is_image_BT
        is_complete_BTI = before_BT[:, :, None] >= jnp.cumsum(num_tokens_BI, axis=1)[:, None]
        image_BT = jnp.sum(is_complete_BTI, axis=-1)
        index_BT = before_BT - jnp.sum(jnp.where(is_complete_BTI, num_tokens_BI[:, None], 0), axis=-1)
        columns_BT = jnp.take_along_axis(jnp.maximum(sizes_BI2[..., 1], 1), image_BT, axis=1, mode="clip")
        is_of_video_BT = jnp.zeros_like(is_image_BT) if steps is None else _is_of_video(steps)
        is_placed_BT = is_image_BT | is_of_video_BT
        is_first_BT = is_image_BT & (index_BT == 0) & ~(is_of_video_BT & _shift(is_of_video_BT))
        tokens_T = jnp.arange(is_image_BT.shape[1])
        start_BT = _latest(is_first_BT)
        step_BT = image_BT - _at(start_BT, image_BT)
        time_BT = step_BT * (0 if steps is None else steps.positions)
        offset_BT3 = jnp.stack([time_BT, index_BT // columns_BT, index_BT % columns_BT], axis=-1)
        if steps is not None and steps.is_audio_BT is not None:
            audio_before_BT = jnp.cumsum(steps.is_audio_BT, axis=1) - steps.is_audio_BT
            audio_BT1 = (audio_before_BT - _at(start_BT, audio_before_BT))[:, :, None]
            offset_BT3 = jnp.where(is_image_BT[:, :, None], offset_BT3, audio_BT1)
        is_last_BT = is_placed_BT & ~_shift(is_placed_BT & ~is_first_BT, by=-1)
        lag_BT = jnp.where(is_last_BT, tokens_T - start_BT - jnp.max(offset_BT3, axis=-1), 0)
        saved_BT = jnp.cumsum(lag_BT, axis=1) - lag_BT
        return cls(image_BT, index_BT, is_placed_BT, start_BT, offset_BT3, saved_BT)

    def axis_positions(self, positions_BT: jax.Array) -> jax.Array:
        """[B, T, 3] positions of time, row and column; text tokens have three equal ones.

        Images of earlier sequences in a row do not count: `positions_BT` starts at 0 in each sequence.
        """
        first_BT = jnp.maximum(jnp.arange(positions_BT.shape[1]) - positions_BT, 0)
        text_BT = positions_BT - self.saved_BT + _at(first_BT, self.saved_BT)
        placed_BT3 = _at(self.start_BT, text_BT)[:, :, None] + self.offset_BT3
        return jnp.where(self.is_placed_BT[:, :, None], placed_BT3, text_BT[:, :, None])


def _is_of_video(steps: VideoSteps) -> jax.Array:
    """[B, T] whether a token is of a video or of its audio."""
    if steps.is_audio_BT is None:
        return steps.is_video_BT
    is_media_BT = steps.is_video_BT | steps.is_audio_BT
    start_BT = _latest(is_media_BT & ~_shift(is_media_BT))
    return steps.is_video_BT | (is_media_BT & (_latest(steps.is_video_BT, otherwise=-1) >= start_BT))


def _latest(is_set_BT: jax.Array, otherwise: int = 0) -> jax.Array:
    """[B, T] index of the last token up to each token that is set; `otherwise` if there is none."""
    return jax.lax.cummax(jnp.where(is_set_BT, jnp.arange(is_set_BT.shape[1]), otherwise), axis=1)


def _shift(is_set_BT: jax.Array, by: int = 1) -> jax.Array:
    """[B, T] the value of the token before each token, or of the one after it with by=-1; False at the end."""
    padded_BT = jnp.pad(is_set_BT, ((0, 0), (1, 1)))
    return padded_BT[:, :-2] if by == 1 else padded_BT[:, 2:]


def _at(index_BT: jax.Array, values_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values_BT, index_BT, axis=1, mode="clip")
