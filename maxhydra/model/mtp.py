"""Multi-token prediction (DeepSeek-V3, 2024): the k-th extra layer predicts the token k after the next.

Its inputs are the hidden states of the layer before it and the embedding of the token k positions later. B batch, T
tokens, D residual stream.
"""

import jax
import jax.numpy as jnp

from maxhydra.layers import Context, ParamBuilder
from maxhydra.model.block import Block, BlockOutput, BlockSpec


class Mtp(Block):
    """norm(block(join([norm(embedding of the later token), norm(hidden)]))); a block with four extra weights."""

    def __init__(self, spec: BlockSpec, make: ParamBuilder, *, scale: float):
        super().__init__(spec, make)
        D = spec.emb_dim
        self.embedding_norm = spec.norm.build(D, make)
        self.hidden_norm = spec.norm.build(D, make)
        self.join = make.projection("join", (2 * D,), (D,), ("embed", None), scale=scale)
        self.norm = spec.norm.build(D, make)

    def predict(self, hidden_BTD: jax.Array, later_BTD: jax.Array, ctx: Context) -> BlockOutput:
        """Hidden states for the head, which then predicts one token further than the layer before."""
        inputs = [self.embedding_norm(later_BTD), self.hidden_norm(hidden_BTD)]
        out = self(self.join(jnp.concatenate(inputs, axis=-1), ctx), ctx)
        return out._replace(x_BTD=ctx.constrain(self.norm(out.x_BTD), "act_batch", "act_length", "act_embed"))
