"""Multi-token prediction (DeepSeek-V3, 2024): the k-th layer behind the last predicts the token k after the next.

It sees what the layer before it made of a token, and the embedding of the token k later, which by then is known. B
batch, T tokens, D residual stream.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.layers import Context, RMSNorm, WeightMaker
from maxhydra.model.block import Block, BlockSpec


class Mtp(nnx.Module):
    """norm(block(join([norm(embedding of the later token), norm(hidden)])))."""

    def __init__(self, spec: BlockSpec, make: WeightMaker, *, scale: float):
        D = spec.emb_dim
        self.embedding_norm = RMSNorm(D, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.hidden_norm = RMSNorm(D, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.join = make.projection("join", (2 * D,), (D,), ("embed", None), scale=scale)
        self.block = Block(spec, make)
        self.norm = RMSNorm(D, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)

    def __call__(self, hidden_BTD: jax.Array, later_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, dict[str, Any]]:
        """What the head takes, and what the block tells besides."""
        both = [self.embedding_norm(later_BTD), self.hidden_norm(hidden_BTD)]
        left = self.block(self.join(jnp.concatenate(both, axis=-1), ctx), ctx)
        out_BTD = ctx.constrain(self.norm(left.x_BTD), "act_batch", "act_length", "act_embed")
        return out_BTD, {"block": left.sides} if left.sides else {}
