"""Rotary position embedding (Su et al., 2021). B batch, T tokens, N heads, H head size, F rotated pairs of a head."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema import model as config
from maxhydra.kernels.qkv_rope.reference import rotate_halves


@dataclasses.dataclass(frozen=True)
class Rotation:
    """RoPE of one layer kind, resolved from the config."""

    frequencies: tuple[float, ...]
    """Radians per token of each pair."""
    amplitude: float
    """Factor on the rotated values."""
    pairs: config.Pairs
    axes: tuple[int, ...] = ()
    """Axis of the position that each pair turns with; empty: positions have one axis."""

    @classmethod
    def of(cls, rope: config.Rope, head_dim: int, *, has_axes: bool = True) -> "Rotation | None":
        """None without positions (NoPE). `has_axes`: some tokens are those of images."""
        rates, axes = frequencies(rope, head_dim), pair_axes(rope.sections) if has_axes else ()
        return None if rates is None else cls(rates, _amplitude(rope), rope.pairs, axes)

    def rotates_halves(self, head_dim: int) -> bool:
        """Whether the whole head is rotated, in pairs of its two halves, as the kernels need."""
        return self.pairs is config.Pairs.halves and 2 * len(self.frequencies) == head_dim


def pair_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Axis of each pair: 0, 1, 2, 0, 1, 2, ..., and 0 from where an axis has all pairs of its section."""
    pairs = range(sum(sections))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in pairs)


def frequencies(rope: config.Rope, head_dim: int) -> tuple[float, ...] | None:
    """Radians per token of each pair: theta^(-2i / size) over the rotated part of a head; None without positions."""
    if rope.kind is config.RopeKind.none:
        return None
    if rope.kind is config.RopeKind.proportional:
        rotated_pairs = int(head_dim * rope.share) // 2
        return tuple(rope.theta ** (-2 * i / head_dim) if i < rotated_pairs else 0.0 for i in range(head_dim // 2))
    size = int(head_dim * rope.share)
    plain = tuple(rope.theta ** (-2 * i / size) for i in range(size // 2))
    if rope.kind is config.RopeKind.linear:
        assert rope.factor
        return tuple(frequency / rope.factor for frequency in plain)
    if rope.kind is config.RopeKind.llama3:
        return tuple(_llama3(frequency, rope) for frequency in plain)
    return _yarn(plain, rope) if rope.kind is config.RopeKind.yarn else plain


def _llama3(frequency: float, rope: config.Rope) -> float:
    """Llama 3.1 (2024): long wavelengths are scaled by `factor`, short ones stay, those between are interpolated."""
    assert rope.factor and rope.low_freq_factor and rope.high_freq_factor and rope.original_context
    periods = rope.original_context * frequency / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    unscaled = min(max((periods - low) / (high - low), 0.0), 1.0) if high != low else float(periods >= low)
    return unscaled * frequency + (1 - unscaled) * frequency / rope.factor


def _yarn(plain: tuple[float, ...], rope: config.Rope) -> tuple[float, ...]:
    """YaRN (Peng et al., 2023): like Llama 3.1, but linear in the pair index between beta_fast and beta_slow."""
    assert rope.factor and rope.original_context
    factor, context = rope.factor, rope.original_context

    def pair(periods: float) -> float:
        """Index of the pair with this many periods over the original context."""
        return len(plain) * math.log(context / (periods * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    # As in the published code, which avoids a division by zero.
    last = last if last != first else first + 0.001

    def interpolate(i: int, frequency: float) -> float:
        scaled = min(max((i - first) / (last - first), 0.0), 1.0)
        return (1 - scaled) * frequency + scaled * frequency / factor

    return tuple(interpolate(i, frequency) for i, frequency in enumerate(plain))


def _amplitude(rope: config.Rope) -> float:
    """YaRN's factor on rotated heads, which sharpens attention as the context grows; 1 for other kinds."""
    if rope.kind is not config.RopeKind.yarn:
        return 1.0
    assert rope.factor
    return rope.attention_factor or (0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0)


def paged_rope_factors(positions_B: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """(c, s), each [B, H], that rotate heads as x * c + y * s, where y is x with its two halves swapped."""
    # Signed angles of whole heads: for two concatenated halves XLA would emit a kernel each.
    halves = dataclasses.replace(rotation, frequencies=(*(-f for f in rotation.frequencies), *rotation.frequencies))
    return cos_and_sin(positions_B[:, None], halves)


def rotate(x_BTNH: jax.Array, positions_BT: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate each pair by position * frequency.

    Interleaved pairs are returned as halves; attention logits do not depend on the order within a head. Computed in
    float32: bfloat16 cannot distinguish positions 256 and 257. Positions are [B, T], or [B, T, axes].
    """
    positions = positions_BT[:, :, None] if positions_BT.ndim == 2 else positions_BT
    cos, sin = cos_and_sin(positions[:, :, None], rotation)
    size = 2 * len(rotation.frequencies)
    x_rotated = x_BTNH[..., :size] if rotation.pairs is config.Pairs.halves else as_halves(x_BTNH[..., :size])
    out = rotate_halves(x_rotated, cos, sin)
    return out if size == x_BTNH.shape[-1] else jnp.concatenate([out, x_BTNH[..., size:]], axis=-1)


def rotate_last(
    x_BTNH: jax.Array, positions_BT: jax.Array, rotation: Rotation, *, is_inverse: bool = False
) -> jax.Array:
    """`rotate` for the last dimensions of a head instead of the first; features keep their order.

    `is_inverse`: rotate by the negative position.
    """
    plain, last = jnp.split(x_BTNH, [x_BTNH.shape[-1] - 2 * len(rotation.frequencies)], axis=-1)
    cos, sin = cos_and_sin(positions_BT[:, :, None, None], rotation)
    sin = -sin if is_inverse else sin
    if rotation.pairs is config.Pairs.halves:
        return jnp.concatenate([plain, rotate_halves(last, cos, sin)], axis=-1)
    halves = rotate_halves(as_halves(last), cos, sin)
    pairs = halves.reshape(*halves.shape[:-1], 2, -1)
    return jnp.concatenate([plain, pairs.mT.reshape(last.shape)], axis=-1)


def rotate_2d(x_IPAH: jax.Array, positions_IP2: jax.Array, theta: float) -> jax.Array:
    """Rotate heads by two coordinates, such as the row and the column of a patch, in float32.

    Pairs are those of the two halves of a head. The first half of the pairs turns with the first coordinate, the rest
    with the second; both have the frequencies of a head of half the size.
    """
    size = x_IPAH.shape[-1] // 2
    rates = np.asarray([theta ** (-2 * i / size) for i in range(size // 2)], np.float32)
    angles = positions_IP2[:, :, :, None].astype(jnp.float32) * rates
    angles = angles.reshape(*positions_IP2.shape[:2], 1, size)
    return rotate_halves(x_IPAH, jnp.cos(angles), jnp.sin(angles))


def cos_and_sin(positions: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles, each [..., F], for positions [..., 1], or [..., 3] by the axis of each pair."""
    if positions.shape[-1] > 1:
        positions = positions[..., np.asarray(rotation.axes)]
    angles = positions.astype(jnp.float32) * np.asarray(rotation.frequencies, np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if rotation.amplitude == 1 else (cos * rotation.amplitude, sin * rotation.amplitude)


def as_halves(x: jax.Array) -> jax.Array:
    """Reorder heads from interleaved pairs (x[2i], x[2i + 1]) to pairs across the two halves."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
