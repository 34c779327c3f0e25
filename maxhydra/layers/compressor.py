"""Compressed entries of tokens: every group of `rate` tokens of a sequence becomes one vector (DeepSeek-V4, 2026).

An entry is the sum of a projection of its tokens, with weights for each feature that are a softmax over the tokens of
another projection plus a bias by place in the group. With overlap it also sums the tokens of the group before, by
separate projections. It is normalized and rotated to the position of its first token.

Groups are counted from the start of a sequence, so packed sequences have the entries that each has alone. A row of T
tokens has at most T / rate entries, whose last tokens are found first.

B batch, T tokens, S tokens of this call and before it, D residual stream, W entries, R tokens of a group, H head size,
C features of a projection: H, or 2 H with overlap.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.layers.context import Context
from maxhydra.layers.norm import RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder
from maxhydra.layers.rope import Rotation, rotate_last
from maxhydra.layers.short_convolution import last_tokens


class Groups(NamedTuple):
    """The complete groups that end in this call."""

    last_BW: jax.Array
    """Index of the last token of each group in this call; any if the group does not exist."""
    positions_BW: jax.Array
    """Position of that token in its sequence, -1 if the group does not exist."""
    segments_BW: jax.Array | None
    """Its segment; None without segments."""


def find_groups(ctx: Context, rate: int) -> Groups:
    """The groups of `rate` tokens that end in this call, in order."""
    T = ctx.positions.shape[1]
    is_last_BT = ((ctx.positions + 1) % rate == 0) & ctx.is_real_BT
    sorted_BW = jnp.sort(jnp.where(is_last_BT, jnp.arange(T), T), axis=1)[:, : -(-T // rate)]
    exists_BW, last_BW = sorted_BW < T, jnp.minimum(sorted_BW, T - 1)
    positions_BW = jnp.where(exists_BW, _take_tokens(ctx.positions[..., None], last_BW[..., None], ctx)[..., 0], -1)
    segments_BW = (
        None if ctx.segments is None else _take_tokens(ctx.segments[..., None], last_BW[..., None], ctx)[..., 0]
    )
    return Groups(last_BW, positions_BW, segments_BW)


@dataclasses.dataclass(frozen=True)
class CompressorSpec:
    """Sizes of a compressor, resolved from the config."""

    emb_dim: int
    head_dim: int
    rate: int
    has_overlap: bool
    rotation: Rotation
    norm_eps: float
    init_scale: float
    dtypes: Dtypes

    @property
    def width(self) -> int:
        """Features of a projection."""
        return self.head_dim * (1 + self.has_overlap)

    @property
    def tokens_before(self) -> int:
        """Tokens before the last one of a group that its entry sums."""
        return self.rate * (1 + self.has_overlap) - 1

    def forward_flops(self) -> float:
        return 2.0 * 2 * self.emb_dim * self.width


class Compressor(nnx.Module):
    """norm(sum over tokens of softmax(gate(x) + position_bias) * value(x)), rotated."""

    def __init__(self, spec: CompressorSpec, make: ParamBuilder):
        self.spec = spec
        D, C, scale = spec.emb_dim, spec.width, spec.init_scale
        self.value = make.projection("value", (D,), (C,), ("embed", "head_dim"), scale=scale)
        self.gate = make.projection("gate", (D,), (C,), ("embed", "head_dim"), scale=scale)
        self.position_bias = make.zeros((spec.rate, C), ("positions", None))
        self.position_bias.set_metadata(is_wide=True)
        self.norm = RMSNorm(spec.head_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)

    def __call__(
        self, x_BTD: jax.Array, groups: Groups, tail_BPC: jax.Array | None, ctx: Context
    ) -> tuple[jax.Array, jax.Array | None]:
        """[B, W, H] entries of the groups, and the tail of the last tokens if one was given.

        Projections of tokens before this call are in the tail, [B, P, 2 C].
        """
        spec, B = self.spec, groups.last_BW.shape[0]
        all_BSC = jnp.concatenate([self.value(x_BTD, ctx), self.gate(x_BTD, ctx)], axis=-1)
        all_BSC = ctx.constrain(all_BSC, "act_batch", None, None)
        before = 0
        if tail_BPC is not None:
            before = tail_BPC.shape[1]
            all_BSC = jnp.concatenate([tail_BPC.astype(all_BSC.dtype), all_BSC], axis=1)
            tail_BPC = last_tokens(all_BSC, ctx.segments, before).astype(tail_BPC.dtype)
        own_BWR = groups.last_BW[..., None] + before + jnp.arange(1 - spec.rate, 1)

        def gather(index_BWR: jax.Array, part: slice) -> tuple[jax.Array, jax.Array]:
            """Values and biased gates of these tokens, a part of their features."""
            flat_BI1 = jnp.maximum(index_BWR, 0).reshape(B, -1, 1)
            value_BSC, gate_BSC = (x[..., part] for x in jnp.split(all_BSC, 2, axis=-1))
            value, gate = (_take_tokens(x, flat_BI1, ctx).reshape(*index_BWR.shape, -1) for x in (value_BSC, gate_BSC))
            return value, gate.astype(jnp.float32) + self.position_bias[..., part].astype(jnp.float32)

        value_BWRH, gate_BWRH = gather(own_BWR, slice(spec.width - spec.head_dim, None))
        if spec.has_overlap:
            earlier_value, earlier_gate = gather(own_BWR - spec.rate, slice(0, spec.head_dim))
            has_earlier_BW = groups.positions_BW >= 2 * spec.rate - 1
            earlier_gate = jnp.where(has_earlier_BW[..., None, None], earlier_gate, -jnp.inf)
            value_BWRH = jnp.concatenate([earlier_value, value_BWRH], axis=2)
            gate_BWRH = jnp.concatenate([earlier_gate, gate_BWRH], axis=2)
        weights_BWRH = jax.nn.softmax(gate_BWRH, axis=2).astype(value_BWRH.dtype)
        entry_BWH = self.norm(jnp.sum(value_BWRH * weights_BWRH, axis=2))
        first_BW = jnp.maximum(groups.positions_BW + 1 - spec.rate, 0)
        return rotate_last(entry_BWH[:, :, None], first_BW, spec.rotation)[:, :, 0], tail_BPC


def _take_tokens(x_BSC: jax.Array, index_BI1: jax.Array, ctx: Context) -> jax.Array:
    """[B, I, C] features of the tokens with these indices; each device takes those of its sequences.

    XLA's partitioner aborts on this gather with stages and tensor parallelism.
    """
    place = ctx.place.dividing(batch=x_BSC.shape[0])
    rows = place.spec("batch", None, None)
    return place.shard_map(lambda x, index: jnp.take_along_axis(x, index, axis=1), (rows, rows), rows)(x_BSC, index_BI1)
