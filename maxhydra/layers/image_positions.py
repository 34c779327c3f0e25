"""Positions of RoPE in a sequence with images, on the axes time, row and column (Wang et al., 2024).

All tokens of an image have one time, and the rows and columns of its grid. The text behind it continues at the position
after the longest side of the grid. B batch, T tokens, I images.
"""

import jax
import jax.numpy as jnp


def image_positions(positions_BT: jax.Array, is_image_BT: jax.Array, sizes_BI2: jax.Array) -> jax.Array:
    """[B, T, 3] positions of time, row and column; text tokens have three equal ones.

    `sizes_BI2`: rows and columns of tokens of each image, zeros for padding.
    """
    num_tokens_BI = jnp.prod(sizes_BI2, axis=-1)
    saved_BI = num_tokens_BI - jnp.max(sizes_BI2, axis=-1)
    # Image tokens before each token, and images that are complete by then.
    before_BT = jnp.cumsum(is_image_BT, axis=1) - is_image_BT
    is_complete_BTI = before_BT[:, :, None] >= jnp.cumsum(num_tokens_BI, axis=1)[:, None]
    index_BT = before_BT - jnp.sum(jnp.where(is_complete_BTI, num_tokens_BI[:, None], 0), axis=-1)
    text_BT = positions_BT - jnp.sum(jnp.where(is_complete_BTI, saved_BI[:, None], 0), axis=-1)
    image_BT = jnp.minimum(jnp.sum(is_complete_BTI, axis=-1), sizes_BI2.shape[1] - 1)
    columns_BT = jnp.maximum(jnp.take_along_axis(sizes_BI2[..., 1], image_BT, axis=1), 1)
    start_BT = text_BT - index_BT
    on_image_BT3 = jnp.stack([start_BT, start_BT + index_BT // columns_BT, start_BT + index_BT % columns_BT], axis=-1)
    return jnp.where(is_image_BT[:, :, None], on_image_BT3, text_BT[:, :, None])
