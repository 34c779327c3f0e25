"""Rotary position embedding (Su et al., 2021), with the frequency scaling of Llama 3.1 (Dubey et al., 2024)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import model as config


def frequencies(rope: config.Rope, head_dim: int) -> tuple[float, ...] | None:
    """Radians per token by which each pair of a head turns, theta^(-2i / head_dim); None for no positions."""
    if rope.kind is config.RopeKind.none:
        return None
    plain = tuple(rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    if rope.kind is config.RopeKind.default:
        return plain
    return tuple(_stretched(frequency, rope) for frequency in plain)


def _stretched(frequency: float, rope: config.Rope) -> float:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, and those between are blended."""
    assert rope.factor and rope.low_freq_factor and rope.high_freq_factor and rope.original_context
    turns = rope.original_context * frequency / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = min(max(kept, 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / rope.factor


def turns(positions_B: jax.Array, frequencies: tuple[float, ...]) -> tuple[jax.Array, jax.Array]:
    """(c, s), each [B, H], that rotate heads by x * c + y * s, where y is x with the halves of a head exchanged."""
    angles_BF = positions_B[:, None].astype(jnp.float32) * np.asarray(frequencies, np.float32)
    cos, sin = jnp.cos(angles_BF), jnp.sin(angles_BF)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x_BTNH: jax.Array, positions_BT: jax.Array, frequencies: tuple[float, ...]) -> jax.Array:
    """Turn each pair (x[i], x[i + H/2]) by position * frequency[i].

    The pairs are halves of the head rather than neighbours, as in the published weights, which then load unpermuted.
    Angles and products are in float32: bfloat16 cannot tell position 257 from 256.
    """
    angles_BT1F = positions_BT[:, :, None, None].astype(jnp.float32) * np.asarray(frequencies, np.float32)
    cos, sin = jnp.cos(angles_BT1F), jnp.sin(angles_BT1F)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def as_halves(x: jax.Array) -> jax.Array:
    """Heads whose pairs are neighbours (x[2i], x[2i + 1]) with the pairs where `rotate` takes them."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
