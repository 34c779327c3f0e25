"""Places of image tokens in a sequence: their image, their index in it, and their positions of RoPE.

Positions have the axes time, row and column (Wang et al., 2024). All tokens of an image have one time, and the rows and
columns of its grid. The text behind it continues at the position after the longer side of the grid. A step of a video
is an image; the steps of one video may also share their rows and columns and differ in time (Qwen3-Omni, 2025). B
batch, T tokens, I images.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class VideoSteps(NamedTuple):
    """Which tokens are of videos, and how many positions a step is behind the one before."""

    is_video_BT: jax.Array
    positions: int


class ImagePlaces(NamedTuple):
    """Where the tokens of images are."""

    is_image_BT: jax.Array
    image_BT: jax.Array
    """Images before a token; of an image token, the number of its image."""
    index_BT: jax.Array
    """Of an image token, its index in the image."""
    saved_BT: jax.Array
    """Tokens of the images before a token, less the positions that they take."""
    columns_BT: jax.Array
    """Of an image token, the columns of the image's grid."""
    time_BT: jax.Array
    """Of an image token, the positions from the beginning of its video to its step; 0 without steps."""
    taken_BT: jax.Array
    """Of an image token, the positions that earlier steps of its video take; 0 without steps."""

    @classmethod
    def of(cls, is_image_BT: jax.Array, sizes_BI2: jax.Array, steps: VideoSteps | None = None) -> "ImagePlaces":
        """`sizes_BI2`: rows and columns of tokens of each image, zeros for padding.

        With `steps`, images whose tokens directly follow each other in a video are steps of one video.
        """
        num_tokens_BI = jnp.prod(sizes_BI2, axis=-1)
        before_BT = jnp.cumsum(is_image_BT, axis=1) - is_image_BT
        is_complete_BTI = before_BT[:, :, None] >= jnp.cumsum(num_tokens_BI, axis=1)[:, None]
        image_BT = jnp.sum(is_complete_BTI, axis=-1)
        index_BT = before_BT - jnp.sum(jnp.where(is_complete_BTI, num_tokens_BI[:, None], 0), axis=-1)
        longest_BI = jnp.max(sizes_BI2, axis=-1)
        time_BI = jnp.zeros_like(longest_BI)
        if steps is not None:
            is_first_BT = is_image_BT & (index_BT == 0) & ~_follows(steps.is_video_BT)
            time_BI = steps.positions * _step_numbers(is_first_BT, image_BT, count=sizes_BI2.shape[1])
        # A video takes the positions up to the time of its last step, or of its rows or columns if they are more.
        earlier_BI = time_BI if steps is None else time_BI - steps.positions
        taken_BI = jnp.where(time_BI == 0, 0, jnp.maximum(earlier_BI + 1, longest_BI))
        added_BI = jnp.maximum(time_BI + 1, longest_BI) - taken_BI
        saved_BI = jnp.where(num_tokens_BI == 0, 0, num_tokens_BI - added_BI)

        def of_image(values_BI: jax.Array) -> jax.Array:
            return jnp.take_along_axis(values_BI, image_BT, axis=1, mode="clip")

        return cls(
            is_image_BT,
            image_BT,
            index_BT,
            jnp.sum(jnp.where(is_complete_BTI, saved_BI[:, None], 0), axis=-1),
            jnp.maximum(of_image(sizes_BI2[..., 1]), 1),
            of_image(time_BI),
            of_image(taken_BI),
        )

    def axis_positions(self, positions_BT: jax.Array) -> jax.Array:
        """[B, T, 3] positions of time, row and column; text tokens have three equal ones.

        Images of earlier sequences in a row do not count: `positions_BT` starts at 0 in each sequence.
        """
        first_BT = jnp.maximum(jnp.arange(positions_BT.shape[1]) - positions_BT, 0)
        text_BT = positions_BT - self.saved_BT + jnp.take_along_axis(self.saved_BT, first_BT, axis=1, mode="clip")
        start_BT, row_BT = text_BT - self.index_BT - self.taken_BT, self.index_BT // self.columns_BT
        column_BT = self.index_BT % self.columns_BT
        on_image_BT3 = jnp.stack([start_BT + self.time_BT, start_BT + row_BT, start_BT + column_BT], axis=-1)
        return jnp.where(self.is_image_BT[:, :, None], on_image_BT3, text_BT[:, :, None])


def _follows(is_video_BT: jax.Array) -> jax.Array:
    """[B, T] whether a token of a video follows another one."""
    return is_video_BT & jnp.pad(is_video_BT, ((0, 0), (1, 0)))[:, :-1]


def _step_numbers(is_first_BT: jax.Array, image_BT: jax.Array, *, count: int) -> jax.Array:
    """[B, I] number of each image among those since the last one that is first in its video; 0 for other images."""
    images_I = jnp.arange(count)
    is_first_BI = jnp.any(is_first_BT[:, :, None] & (image_BT[:, :, None] == images_I), axis=1)
    first_BI = jax.lax.cummax(jnp.where(is_first_BI, images_I, 0), axis=1)
    return images_I - first_BI
