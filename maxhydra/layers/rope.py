"""Rotary position embedding (Su et al., 2021). B batch, T tokens, N heads, H head size, F pairs of a head that turn."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema import model as config
from maxhydra.kernels.qkv_rope.reference import rotated


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How positions turn heads."""

    frequencies: tuple[float, ...]
    """Radians per token of each pair."""
    amplitude: float
    """Factor on what is turned."""
    pairs: config.Pairs

    @classmethod
    def of(cls, rope: config.Rope, head_dim: int) -> "Rotation | None":
        """None for no positions."""
        rates = frequencies(rope, head_dim)
        return None if rates is None else cls(rates, _amplitude(rope), rope.pairs)

    def rotates_halves(self, head_dim: int) -> bool:
        """Whether `turns` can say it: all of a head turns, in pairs of its halves."""
        return self.pairs is config.Pairs.halves and 2 * len(self.frequencies) == head_dim


def frequencies(rope: config.Rope, head_dim: int) -> tuple[float, ...] | None:
    """Radians per token by which each pair turns, theta^(-2i / size) for a part of a head of this size; None for no
    positions."""
    if rope.kind is config.RopeKind.none:
        return None
    if rope.kind is config.RopeKind.proportional:
        turning = int(head_dim * rope.share) // 2
        return tuple(rope.theta ** (-2 * i / head_dim) if i < turning else 0.0 for i in range(head_dim // 2))
    size = int(head_dim * rope.share)
    plain = tuple(rope.theta ** (-2 * i / size) for i in range(size // 2))
    if rope.kind is config.RopeKind.linear:
        assert rope.factor
        return tuple(frequency / rope.factor for frequency in plain)
    if rope.kind is config.RopeKind.llama3:
        return tuple(_stretched(frequency, rope) for frequency in plain)
    return _yarn(plain, rope) if rope.kind is config.RopeKind.yarn else plain


def _stretched(frequency: float, rope: config.Rope) -> float:
    """Llama 3.1 (2024): long wavelengths are stretched by `factor`, short ones stay, and those between are blended."""
    assert rope.factor and rope.low_freq_factor and rope.high_freq_factor and rope.original_context
    turns = rope.original_context * frequency / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = min(max((turns - low) / (high - low), 0.0), 1.0) if high != low else float(turns >= low)
    return kept * frequency + (1 - kept) * frequency / rope.factor


def _yarn(plain: tuple[float, ...], rope: config.Rope) -> tuple[float, ...]:
    """YaRN (Peng et al., 2023): as above, but blended evenly over the pairs between beta_fast and beta_slow turns."""
    assert rope.factor and rope.original_context
    factor, context = rope.factor, rope.original_context

    def pair(turns: float) -> float:
        """Which pair turns so often over the original context."""
        return len(plain) * math.log(context / (turns * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    # The published form keeps apart what would be one.
    last = last if last != first else first + 0.001

    def blended(i: int, frequency: float) -> float:
        stretched = min(max((i - first) / (last - first), 0.0), 1.0)
        return (1 - stretched) * frequency + stretched * frequency / factor

    return tuple(blended(i, frequency) for i, frequency in enumerate(plain))


def _amplitude(rope: config.Rope) -> float:
    """YaRN sharpens attention as it stretches positions."""
    if rope.kind is not config.RopeKind.yarn:
        return 1.0
    assert rope.factor
    return rope.attention_factor or (0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0)


def turns(positions_B: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """(c, s), each [B, H], that rotate heads by x * c + y * s, where y is x with the halves of a head exchanged."""
    # Angles of whole heads, with their signs: of halves put together the compiler would make a kernel for each of both.
    halves = dataclasses.replace(rotation, frequencies=(*(-f for f in rotation.frequencies), *rotation.frequencies))
    return cos_and_sin(positions_B[:, None], halves)


def rotate(x_BTNH: jax.Array, positions_BT: jax.Array, rotation: Rotation) -> jax.Array:
    """Turn each pair by position * frequency. Neighbours end up at the same place of the halves: a product of queries
    and keys does not mind.

    Angles and products are in float32: bfloat16 cannot tell position 257 from 256.
    """
    cos, sin = cos_and_sin(positions_BT[:, :, None, None], rotation)
    size = 2 * len(rotation.frequencies)
    part = x_BTNH[..., :size] if rotation.pairs is config.Pairs.halves else as_halves(x_BTNH[..., :size])
    turned = rotated(part, cos, sin)
    return turned if size == x_BTNH.shape[-1] else jnp.concatenate([turned, x_BTNH[..., size:]], axis=-1)


def cos_and_sin(positions: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """Of [..., 1] positions, each [..., F]."""
    angles = positions.astype(jnp.float32) * np.asarray(rotation.frequencies, np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if rotation.amplitude == 1 else (cos * rotation.amplitude, sin * rotation.amplitude)


def as_halves(x: jax.Array) -> jax.Array:
    """Heads whose pairs are neighbours (x[2i], x[2i + 1]) with the pairs at the same place of their halves."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
