"""Norms of queries and keys (Henry et al., 2020), which bound the attention logits. N heads, H head size.

They come before positions. Without a scale the order makes no difference: turning a head keeps its mean square.
"""

import jax

from maxhydra.config.schema import model as config
from maxhydra.layers.norm import Norm, NormSpec, PlainNorm
from maxhydra.layers.params import ParamBuilder


def heads_norm(kind: config.QkNorm, norm: NormSpec, heads: int, head_dim: int, make: ParamBuilder) -> Norm | None:
    """The norm of so many heads; None where there is none."""
    if kind is config.QkNorm.none:
        return None
    if kind is config.QkNorm.head_plain:
        return PlainNorm(eps=norm.eps, dtypes=norm.dtypes)
    return norm.build(heads * head_dim if kind is config.QkNorm.whole else head_dim, make)


def normed_heads(x: jax.Array, kind: config.QkNorm, norm: Norm | None) -> jax.Array:
    """Heads [..., N, H], each normalised for itself, or all of a token together."""
    if norm is None:
        return x
    if kind is config.QkNorm.whole:
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
    return norm(x)
