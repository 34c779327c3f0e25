"""Places of image tokens in a sequence: their image, their index in it, and their positions of RoPE.

Positions have the axes time, row and column (Wang et al., 2024). All tokens of an image have one time, and the rows and
columns of its grid. The text behind it continues at the position after the longer side of the grid. B batch, T tokens,
I images.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


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

    @classmethod
    def of(cls, is_image_BT: jax.Array, sizes_BI2: jax.Array) -> "ImagePlaces":
        """`sizes_BI2`: rows and columns of tokens of each image, zeros for padding."""
        num_tokens_BI = jnp.prod(sizes_BI2, axis=-1)
        saved_BI = num_tokens_BI - jnp.max(sizes_BI2, axis=-1)
        before_BT = jnp.cumsum(is_image_BT, axis=1) - is_image_BT
        is_complete_BTI = before_BT[:, :, None] >= jnp.cumsum(num_tokens_BI, axis=1)[:, None]
        image_BT = jnp.sum(is_complete_BTI, axis=-1)
        columns_BT = jnp.take_along_axis(sizes_BI2[..., 1], image_BT, axis=1, mode="clip")
        return cls(
            is_image_BT,
            image_BT,
            before_BT - jnp.sum(jnp.where(is_complete_BTI, num_tokens_BI[:, None], 0), axis=-1),
            jnp.sum(jnp.where(is_complete_BTI, saved_BI[:, None], 0), axis=-1),
            jnp.maximum(columns_BT, 1),
        )

    def axis_positions(self, positions_BT: jax.Array) -> jax.Array:
        """[B, T, 3] positions of time, row and column; text tokens have three equal ones.

        Images of earlier sequences in a row do not count: `positions_BT` starts at 0 in each sequence.
        """
        first_BT = jnp.maximum(jnp.arange(positions_BT.shape[1]) - positions_BT, 0)
        text_BT = positions_BT - self.saved_BT + jnp.take_along_axis(self.saved_BT, first_BT, axis=1, mode="clip")
        start_BT, row_BT = text_BT - self.index_BT, self.index_BT // self.columns_BT
        column_BT = self.index_BT % self.columns_BT
        on_image_BT3 = jnp.stack([start_BT, start_BT + row_BT, start_BT + column_BT], axis=-1)
        return jnp.where(self.is_image_BT[:, :, None], on_image_BT3, text_BT[:, :, None])
