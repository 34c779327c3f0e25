"""What is asked of attention: how logits become weights, and which key each query may see.

Shapes: B batch, T queries, S keys, N query heads, K key and value heads, G = N / K, H head size; values may have
another.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

# The name of what a kernel keeps for its backward pass, by which a remat policy can keep it.
KEPT = "attention_kernel"


@dataclasses.dataclass(frozen=True)
class Request:
    """The static part of a call; every field changes the result, and every backend honours all or refuses."""

    scale: float
    """Factor on the logits."""
    causal: bool
    """A query sees no later key."""
    window: int | None
    """A query sees itself and the window - 1 tokens before it; needs causal. None: all before it."""
    chunk: int | None
    """A query sees only keys of its own chunk of so many tokens; needs causal, and no window. None: of all chunks.
    Chunks are counted by position, or by index where there are none."""
    softcap: float | None
    """Logits become softcap * tanh(logits / softcap)."""
    softmax_dtype: str
    """Least number format of the logits and the softmax."""
    is_length_split: bool
    """The queries are split over devices along T, so that a slice along T would move them between devices."""

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            if getattr(self, name) is not None and not self.causal:
                raise ValueError(f"{name}={getattr(self, name)} needs causal attention")
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"window={self.window} and chunk={self.chunk}: one of them")


class TokenInfo(NamedTuple):
    """What is known of each query and key besides its content; None where it does not matter.

    Segments: a query sees only keys of its own segment; segment 0 is padding, which sees and is seen by nothing.
    Positions replace the index in the array, for keys that come from a cache; a negative one marks an absent token.
    A query that sees no key gives zeros.
    """

    q_segments_BT: jax.Array | None
    kv_segments_BS: jax.Array | None
    q_positions_BT: jax.Array | None
    kv_positions_BS: jax.Array | None
    chosen_BTS: jax.Array | None = None
    """Keys that were chosen for each query; it sees no others. None: all are."""


def visible(request: Request, tokens: TokenInfo, *, queries: range, keys: range) -> jax.Array | None:
    """Which of the keys each of the queries sees, [B or 1, T, S]; None where all see all."""
    masks: list[jax.Array] = []
    if tokens.q_positions_BT is not None and tokens.kv_positions_BS is not None:
        q_BT1, kv_B1S = _pair(tokens.q_positions_BT, tokens.kv_positions_BS, queries, keys)
        masks.append((q_BT1 >= 0) & (kv_B1S >= 0))
    else:
        q_BT1 = jnp.arange(queries.start, queries.stop)[None, :, None]
        kv_B1S = jnp.arange(keys.start, keys.stop)[None, None, :]
    if request.causal:
        masks.append(kv_B1S <= q_BT1)
    if request.window is not None:
        masks.append(kv_B1S > q_BT1 - request.window)
    if request.chunk is not None:
        masks.append(kv_B1S // request.chunk == q_BT1 // request.chunk)
    if tokens.q_segments_BT is not None:
        masks.append(same_segment(tokens, queries=queries, keys=keys))
    if tokens.chosen_BTS is not None:
        masks.append(tokens.chosen_BTS[:, queries.start : queries.stop, keys.start : keys.stop])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def same_segment(tokens: TokenInfo, *, queries: range, keys: range) -> jax.Array:
    """Which keys are of each query's segment, [B, T, S]; none for padding."""
    assert tokens.q_segments_BT is not None and tokens.kv_segments_BS is not None
    q_BT1, kv_B1S = _pair(tokens.q_segments_BT, tokens.kv_segments_BS, queries, keys)
    return (q_BT1 == kv_B1S) & (q_BT1 != 0)


def _pair(q_BT: jax.Array, kv_BS: jax.Array, queries: range, keys: range) -> tuple[jax.Array, jax.Array]:
    """The queries as a column and the keys as a row."""
    return q_BT[:, queries.start : queries.stop, None], kv_BS[:, None, keys.start : keys.stop]
