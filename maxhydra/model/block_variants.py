"""Layers that connect mixer and feed-forward to the residual stream in another way than `Block`.

B batch, T tokens, D residual stream, L width of a latent branch, n residual streams.
"""

import dataclasses

import jax

from maxhydra.layers import Cache, CacheSpec, Context, ParamBuilder, dropout
from maxhydra.layers.engram import Engram
from maxhydra.layers.hyper_connections import HyperConnection
from maxhydra.layers.kv_cache import JointCache
from maxhydra.model.block import Block, BlockOutput, BlockSpec, add_residual, block_output


class LatentBlock(Block):
    """x + up(mlp(norm(attention(norm(x))))): one residual branch, whose inner width is latent_dim (L)."""

    def __init__(self, spec: BlockSpec, make: ParamBuilder):
        super().__init__(spec, make)
        assert spec.latent_dim is not None
        self.up = make.projection("up", (spec.latent_dim,), (spec.emb_dim,), (None, "embed"), scale=spec.up_scale)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> BlockOutput:
        x_BTD = ctx.constrain_stream(x_BTD)
        x_BTD, normed_BTD = self.split_norm(self.attention_norm, x_BTD, ctx)
        mixer = self.attention(normed_BTD, ctx)

        x_BTD, latent_BTL = (ctx.select_output_tokens(x) for x in (x_BTD, mixer.out_BTD))
        ctx = ctx.for_output_tokens()
        feed_forward = self.mlp(self.split_norm(self.mlp_norm, latent_BTL, ctx)[1], ctx)
        branch_BTD = self.branch_output(None, ctx.to_stream(self.up(feed_forward.out_BTD, ctx)))
        x_BTD = add_residual(x_BTD, dropout(branch_BTD, ctx.key(0), rate=self.spec.dropout), ctx)

        x_BTD = self.add_layer_input(x_BTD, ctx)
        aux = {"mlp": feed_forward.aux, "attention": mixer.aux}
        return block_output(x_BTD, mixer, feed_forward.out_BTD, aux, ctx)


class HyperBlock(Block):
    """A layer whose two branches read from and write to several residual streams (hyper_connections.py)."""

    def __init__(self, spec: BlockSpec, make: ParamBuilder):
        super().__init__(spec, make)
        assert spec.hyper is not None
        self.attention_streams = HyperConnection(spec.hyper, make.below("attention_streams"))
        self.mlp_streams = HyperConnection(spec.hyper, make.below("mlp_streams"))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> BlockOutput:
        """`x_BTD`: all streams, [B, T, n * D]."""
        rate = self.spec.dropout
        x_BTD = ctx.constrain_stream(x_BTD)
        weights = self.attention_streams.weights(x_BTD)
        branch_BTD = self.attention_streams.read(x_BTD, weights)
        mixer = self.attention(self.split_norm(self.attention_norm, branch_BTD, ctx)[1], ctx)
        branch_BTD = dropout(self.branch_output(self.attention_post_norm, mixer.out_BTD), ctx.key(0), rate=rate)
        x_BTD = ctx.constrain_stream(self.attention_streams.write(x_BTD, branch_BTD, weights))

        x_BTD, ctx = ctx.select_output_tokens(x_BTD), ctx.for_output_tokens()
        weights = self.mlp_streams.weights(x_BTD)
        branch_BTD = self.mlp_streams.read(x_BTD, weights)
        feed_forward = self.mlp(self.split_norm(self.mlp_norm, branch_BTD, ctx)[1], ctx)
        branch_BTD = dropout(self.branch_output(self.mlp_post_norm, feed_forward.out_BTD), ctx.key(1), rate=rate)
        x_BTD = ctx.constrain_stream(self.mlp_streams.write(x_BTD, branch_BTD, weights))

        aux = {"mlp": feed_forward.aux, "attention": mixer.aux}
        return block_output(x_BTD, mixer, feed_forward.out_BTD, aux, ctx)


class EngramBlock(Block):
    """A layer that adds a memory of n-grams to the residual stream first (engram.py)."""

    def __init__(self, spec: BlockSpec, make: ParamBuilder):
        super().__init__(spec, make)
        assert spec.engram is not None
        self.engram = Engram(spec.engram, make.below("engram"))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> BlockOutput:
        cache = ctx.cache
        mixer_ctx = ctx if cache is None else dataclasses.replace(ctx, cache=cache.parts["mixer"])
        memory_ctx = ctx if cache is None else dataclasses.replace(ctx, cache=cache.parts["memory"])
        x_BTD, memory = self.engram(x_BTD, memory_ctx)
        out = super().__call__(x_BTD, mixer_ctx)
        return out if cache is None else out._replace(cache=JointCache({"mixer": out.cache, "memory": memory}))

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        memory = self.engram.empty_cache(cache_spec, layers)
        return JointCache({"mixer": super().empty_cache(cache_spec, layers), "memory": memory})


class EngramHyperBlock(EngramBlock, HyperBlock):
    """A memory that is added to several residual streams."""
