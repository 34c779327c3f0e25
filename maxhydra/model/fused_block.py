"""The block for single-GPU decoding: the weights and results of `Block`, through kernels that fuse norm and residual.

A decode step reads every weight once for a few rows, so kernel launches cost as much as small weights. Each sub-layer
runs as two kernels: one normalizes the residual stream on its way into the input projections, the other adds the output
projection to the stream. With more than one row the second also computes the norm that comes next, of the MLP or of the
following layer.

`block_class` chooses this class when the weights are laid out for it (model.kernels.projection=joined, which
decode/weight_layout.py sets). Sub-layers or row counts that the kernels do not cover run as in `Block`.

B batch, T tokens, D residual stream, F hidden, N query heads, M heads of query, key and value, H head size, P partial
sums.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema import model as config
from maxhydra.kernels.fused_linear import NormParams as NormParams
from maxhydra.kernels.fused_linear import embed_and_norm
from maxhydra.kernels.matmul import Layout
from maxhydra.layers import (
    Attention,
    Context,
    Embedding,
    FeedForwardOutput,
    MatmulSpec,
    MixerOutput,
    Mlp,
    Norm,
    RMSNorm,
)
from maxhydra.layers.fused_decode import (
    add_projection,
    can_fuse,
    plain_weight,
    project_norm,
    project_norm_partial_sums,
)
from maxhydra.layers.mlp import ACTIVATIONS
from maxhydra.layers.quant.int8 import Int8
from maxhydra.layers.quant.training import is_qat
from maxhydra.model.block import Block, BlockOutput, BlockSpec, add_residual, drop_empty
from maxhydra.model.block_variants import EngramBlock, EngramHyperBlock, HyperBlock, LatentBlock


class _Attended(NamedTuple):
    """x + attention(norm(x)), and the norm of that if a kernel computed it too."""

    mixer: MixerOutput
    normed_BTD: jax.Array | None


class _Fed(NamedTuple):
    """x + mlp(norm(x)), and the next layer's norm of that if a kernel computed it too."""

    feed_forward: FeedForwardOutput
    normed_BTD: jax.Array | None


class FusedBlock(Block):
    """`Block` for decoding, with norms and residual sums fused into the projections."""

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> BlockOutput:
        return self.run(x_BTD, ctx, None, None)[0]

    def run(
        self, x_BTD: jax.Array, ctx: Context, normed_BTD: jax.Array | None, next_scale_D: jax.Array | None
    ) -> tuple[BlockOutput, jax.Array | None]:
        """Run the layer, given its first norm of x if the previous layer computed it.

        `next_scale_D`: scale of the next layer's first norm. Returns that norm of the output too, None if no kernel
        computed it.
        """
        if ctx.dropout_key is not None:
            return super().__call__(x_BTD, ctx), None
        x_BTD = ctx.constrain_stream(x_BTD)
        mixer, mlp_input_BTD = self._attend(x_BTD, ctx, normed_BTD)
        x_BTD, mlp_input_BTD = ctx.select_output_tokens(mixer.out_BTD), ctx.select_output_tokens(mlp_input_BTD)
        ctx = ctx.for_output_tokens()
        feed_forward, next_BTD = self._feed_forward(x_BTD, ctx, mlp_input_BTD, self._next_norm(next_scale_D))
        x_BTD = self.add_layer_input(feed_forward.out_BTD, ctx)
        aux = drop_empty({"mlp": feed_forward.aux, "attention": mixer.aux})
        return BlockOutput(x_BTD, mixer.cache, aux, mixer.shared), next_BTD

    def _attend(self, x_BTD: jax.Array, ctx: Context, normed_BTD: jax.Array | None) -> _Attended:
        """x + attention(norm(x)), with the MLP's norm of that if it is fused."""
        norm, attention = self.attention_norm, self.attention
        if isinstance(norm, RMSNorm) and isinstance(attention, Attention) and can_fuse_attention(attention, x_BTD, ctx):
            return _fused_attention(attention, x_BTD, norm, ctx, normed_BTD, norm_params(self.mlp_norm))
        x_BTD, branch_input_BTD = self.split_norm(norm, x_BTD, ctx)
        mixer = attention(branch_input_BTD, ctx)
        return _Attended(mixer._replace(out_BTD=add_residual(x_BTD, mixer.out_BTD, ctx)), None)

    def _feed_forward(
        self, x_BTD: jax.Array, ctx: Context, normed_BTD: jax.Array | None, next_norm: NormParams | None
    ) -> _Fed:
        """x + mlp(norm(x)), with the next layer's norm of that if it is fused."""
        norm, mlp = self.mlp_norm, self.mlp
        if isinstance(norm, RMSNorm) and isinstance(mlp, Mlp) and can_fuse_mlp(mlp, x_BTD, ctx):
            return _fused_mlp(mlp, x_BTD, norm, normed_BTD, next_norm)
        x_BTD, branch_input_BTD = self.split_norm(norm, x_BTD, ctx)
        feed_forward = mlp(branch_input_BTD, ctx)
        return _Fed(feed_forward._replace(out_BTD=add_residual(x_BTD, feed_forward.out_BTD, ctx)), None)

    def first_norm(self) -> NormParams | None:
        """The norm that the previous kernel can compute for this layer; None if the layer would not use it."""
        return norm_params(self.attention_norm) if isinstance(self.attention, Attention) else None

    def _next_norm(self, next_scale_D: jax.Array | None) -> NormParams | None:
        """The next layer's first norm, unless this layer still changes the stream after its MLP.

        The norms of a model differ only in their scales.
        """
        own = norm_params(self.mlp_norm)
        if own is None or next_scale_D is None or self.per_layer is not None or self.scale is not None:
            return None
        return own._replace(scale_K=next_scale_D)


def block_class(spec: BlockSpec, matmul: MatmulSpec) -> type[Block]:
    """FusedBlock for pre-norm layers whose weights are laid out for the fused kernels; otherwise that of the spec."""
    if spec.latent_dim is not None:
        return LatentBlock
    if spec.engram is not None:
        return EngramBlock if spec.hyper is None else EngramHyperBlock
    if spec.hyper is not None:
        return HyperBlock
    is_laid_out = matmul.is_fused and matmul.layout is Layout.joined
    is_plain = spec.norms is config.Norms.pre and spec.parallel_moe is None and spec.branch_factor == 1
    return FusedBlock if is_laid_out and is_plain else Block


class NormHandoff:
    """Passes the norm that one FusedBlock's last kernel computed to the next block of a stack, in one trace."""

    def __init__(self, blocks: Sequence[Block], ctx: Context, normed_BTD: jax.Array | None = None):
        """`normed_BTD`: the first block's norm of the embeddings if it was computed with them."""
        norms = [block.first_norm() if isinstance(block, FusedBlock) else None for block in blocks[1:]]
        is_passed = ctx.cache is not None and ctx.deepstack is None
        self._next_norms = [*(norms if is_passed else [None] * len(norms)), None]
        self._blocks, self._normed_BTD = blocks, normed_BTD

    def inputs(self, index: int) -> tuple[Callable[..., Any], tuple[jax.Array | None, ...]]:
        """The method that runs the block of this index, and its arguments after the stream and the context."""
        if not isinstance(self._blocks[index], FusedBlock):
            return type(self._blocks[index]).__call__, ()
        next_norm = self._next_norms[index]
        return FusedBlock.run, (self._normed_BTD, None if next_norm is None else next_norm.scale_K)

    def output(self, returned: Any) -> BlockOutput:
        """The block's own output; what it computed for the next block is stored."""
        out, self._normed_BTD = (returned, None) if isinstance(returned, BlockOutput) else returned
        return out


def embed_with_norm(
    embedding: Embedding, tokens_BT: jax.Array, blocks: Sequence[Block], ctx: Context
) -> tuple[jax.Array, jax.Array] | None:
    """Embeddings of the tokens and the first block's norm of them, by one kernel; None if that is not supported."""
    first = blocks[0].first_norm() if blocks and isinstance(blocks[0], FusedBlock) else None
    if first is None or ctx.cache is None or ctx.sharder.mesh.size > 1:
        return None
    spec = embedding.spec
    is_plain = not (isinstance(embedding.table, Int8) or is_qat(embedding.format) or spec.factor != 1)
    if not is_plain or embedding.lora is not None or embedding.positions is not None or spec.is_sinusoidal:
        return None
    shape = (*tokens_BT.shape, spec.emb_dim)
    with jax.named_scope("embedding"):
        rows = embed_and_norm(embedding.table[...].astype(spec.dtypes.compute), tokens_BT.reshape(-1), first)
    return None if rows is None else (rows[0].reshape(shape), rows[1].reshape(shape))


def can_fuse_attention(attention: Attention, x_BTD: jax.Array, ctx: Context) -> bool:
    """Whether the kernels cover this attention layer and number of rows."""
    is_plain = attention.gate is None and can_fuse(attention.qkv, x_BTD, ctx)
    return is_plain and can_fuse((attention.out,), x_BTD, ctx)


@jax.named_scope("attention")
def _fused_attention(
    attention: Attention,
    x_BTD: jax.Array,
    norm: RMSNorm,
    ctx: Context,
    normed_BTD: jax.Array | None,
    next_norm: NormParams | None,
) -> _Attended:
    pages, shared = attention.usable_pages(x_BTD, ctx), None
    if pages is None:
        heads_BTMH = project_norm(attention.qkv, x_BTD, norm, normed_BTD)
        starts = np.cumsum([projection.width for projection in attention.qkv])[:-1]
        heads = attention.normalize_and_rotate(jnp.split(heads_BTMH, starts, axis=2), ctx)
        attended_BTNH, cache, shared = attention.mix_heads(heads, ctx)
    else:
        # The paged kernel sums partial results of a split-K matmul as it reads them; a norm of heads needs the sum.
        if attention.query_norm is None:
            heads_PBTMH = project_norm_partial_sums(attention.qkv, x_BTD, norm, normed_BTD)
        else:
            heads_PBTMH = project_norm(attention.qkv, x_BTD, norm, normed_BTD)[None]
        next_weight = plain_weight(attention.out)
        attended_BTNH, cache = attention.mix_pages(heads_PBTMH, pages, ctx, next_weight=next_weight)
    out_BTD, next_BTD = add_projection(attention.out, attended_BTNH, x_BTD, next_norm=next_norm)
    return _Attended(MixerOutput(out_BTD, cache, {}, shared if attention.spec.is_shared else None), next_BTD)


def can_fuse_mlp(mlp: Mlp, x_BTD: jax.Array, ctx: Context) -> bool:
    """Whether the kernels cover this feed-forward and number of rows."""
    is_gated = mlp.gate is not None and can_fuse((mlp.gate, mlp.up), x_BTD, ctx)
    return is_gated and can_fuse((mlp.down,), x_BTD, ctx)


@jax.named_scope("mlp")
def _fused_mlp(
    mlp: Mlp, x_BTD: jax.Array, norm: RMSNorm, normed_BTD: jax.Array | None, next_norm: NormParams | None
) -> _Fed:
    assert mlp.gate is not None
    activation = ACTIVATIONS[mlp.spec.activation]
    hidden_BTF = project_norm((mlp.gate, mlp.up), x_BTD, norm, normed_BTD, activation)
    out_BTD, next_BTD = add_projection(mlp.down, hidden_BTF, x_BTD, next_norm=next_norm)
    return _Fed(FeedForwardOutput(out_BTD, {}), next_BTD)


def norm_params(norm: Norm | None) -> NormParams | None:
    """An RMSNorm as the kernels take it; None for other norms."""
    return norm.kernel_params if isinstance(norm, RMSNorm) else None
