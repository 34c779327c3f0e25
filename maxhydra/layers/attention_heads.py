"""What happens to the heads of queries, keys and values between projection and attention, and to segments of chunks.

B batch, T tokens, N query heads, H head size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.config.schema import model as config
from maxhydra.layers.norm import Norm, NormSpec, PlainNorm
from maxhydra.layers.params import ParamBuilder


def build_qk_norm(kind: config.QkNorm, norm: NormSpec, sizes: tuple[int, int], make: ParamBuilder) -> Norm | None:
    """Norm of queries, keys (Henry et al., 2020: bounds the attention logits) or values; None without one.

    It is applied before RoPE. Without a scale the order makes no difference: a rotation keeps the mean square.
    """
    if kind is config.QkNorm.none:
        return None
    if kind is config.QkNorm.head_plain:
        return PlainNorm(eps=norm.eps, dtypes=norm.dtypes)
    heads, head_dim = sizes
    return norm.build(heads * head_dim if kind is config.QkNorm.whole else head_dim, make)


def normalize_heads(x: jax.Array, kind: config.QkNorm, norm: Norm | None) -> jax.Array:
    """Heads [..., N, H] normalized one by one, or over all heads of a token."""
    if norm is None:
        return x
    if kind is config.QkNorm.whole:
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
    return norm(x)


class QueryTemperature(NamedTuple):
    """Factor 1 + scale * ln(1 + floor((position + offset) / floor)) on queries."""

    floor: int
    scale: float
    offset: int

    @classmethod
    def of(cls, section: config.Temperature) -> "QueryTemperature | None":
        """None if queries are not scaled."""
        floor, scale = section.floor, section.scale
        return None if floor is None or scale is None else cls(floor, scale, section.offset)


def scale_queries(q_BTNH: jax.Array, positions_BT: jax.Array, temperature: QueryTemperature | None) -> jax.Array:
    """Queries times the factor of their position: attention stays sharp at length (Nakanishi, 2025)."""
    if temperature is None:
        return q_BTNH
    steps_BT = jnp.floor((positions_BT.astype(jnp.float32) + temperature.offset) / temperature.floor)
    factor_BT = 1 + temperature.scale * jnp.log1p(steps_BT)
    return (q_BTNH.astype(jnp.float32) * factor_BT[:, :, None, None]).astype(q_BTNH.dtype)


def chunk_segments(segments_BT: jax.Array | None, positions_BT: jax.Array, chunk: int | None) -> jax.Array | None:
    """Segments that also separate the chunks of each sequence (Llama 4, 2025), for rows that pack sequences.

    A token attends only within its chunk. Chunks are counted from the start of each sequence. 0 is padding.
    """
    if segments_BT is None or chunk is None:
        return segments_BT
    is_first_BT = (segments_BT != jnp.roll(segments_BT, 1, axis=1)).at[:, 0].set(True)
    numbers_BT = jnp.cumsum(is_first_BT | (positions_BT % chunk == 0), axis=1)
    return jnp.where(segments_BT == 0, 0, numbers_BT)
