"""The attention request: how logits become weights, and which keys each query may attend to.

Shapes: B batch, T queries, S keys, N query heads, K key and value heads, G = N / K, H head size; values may have a
different one.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Checkpoint name of the kernels' residuals, for remat policies that save them.
CHECKPOINT_NAME = "attention_kernel"
# Checkpoint name of what context parallelism receives: saved, it is not sent again in the backward pass.
EXCHANGE_NAME = "attention_exchange"


@dataclasses.dataclass(frozen=True)
class Request:
    """The static arguments of a call; every field changes the result, and a backend that lacks one rejects the call."""

    scale: float
    """Factor on the logits."""
    causal: bool
    """A query sees no later key."""
    window: int | None
    """A query sees itself and the window - 1 tokens before it; needs causal. None: all earlier tokens."""
    chunk: int | None
    """A query sees only keys in its chunk of `chunk` tokens; needs causal and no window. None: no chunks.
    Chunks are counted by position, or by index without positions."""
    softcap: float | None
    """Logits become softcap * tanh(logits / softcap)."""
    softmax_dtype: str
    """Lowest precision allowed for logits and softmax."""
    offset: int = 0
    """Index of the first query among the keys, which start with this many earlier tokens; excludes chunks."""

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            if getattr(self, name) is not None and not self.causal:
                raise ValueError(f"{name}={getattr(self, name)} needs causal=True")
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"window={self.window} and chunk={self.chunk} are mutually exclusive; set one to None")
        if self.offset and self.chunk is not None:
            raise ValueError(f"offset={self.offset} and chunk={self.chunk} are mutually exclusive")


class TokenInfo(NamedTuple):
    """Per-token masking information for queries and keys; None if not used.

    Segments: a query sees only keys in its segment; segment 0 is padding, which neither sees nor is seen.
    Positions replace array indices, for keys that come from a cache; a negative position marks an absent token.
    A query that sees no key gives zeros.
    """

    q_segments_BT: jax.Array | None
    kv_segments_BS: jax.Array | None
    q_positions_BT: jax.Array | None
    kv_positions_BS: jax.Array | None
    selected_BTS: jax.Array | None = None
    """Keys selected for each query, which sees no others; None: all keys."""


def visible(request: Request, tokens: TokenInfo, *, queries: range, keys: range) -> jax.Array | None:
    """Mask [B or 1, T, S] of the keys that each query sees; None if all queries see all keys."""
    masks: list[jax.Array] = []
    if tokens.q_positions_BT is not None and tokens.kv_positions_BS is not None:
        q_BT1, kv_B1S = _pair(tokens.q_positions_BT, tokens.kv_positions_BS, queries, keys)
        masks.append((q_BT1 >= 0) & (kv_B1S >= 0))
    else:
        q_BT1 = request.offset + jnp.arange(queries.start, queries.stop)[None, :, None]
        kv_B1S = jnp.arange(keys.start, keys.stop)[None, None, :]
    if request.causal:
        masks.append(kv_B1S <= q_BT1)
    if request.window is not None:
        masks.append(kv_B1S > q_BT1 - request.window)
    if request.chunk is not None:
        masks.append(kv_B1S // request.chunk == q_BT1 // request.chunk)
    if tokens.q_segments_BT is not None:
        masks.append(same_segment(tokens, queries=queries, keys=keys))
    if tokens.selected_BTS is not None:
        masks.append(tokens.selected_BTS[:, queries.start : queries.stop, keys.start : keys.stop])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def same_segment(tokens: TokenInfo, *, queries: range, keys: range) -> jax.Array:
    """Mask [B, T, S] of the keys in each query's segment; padding queries have none."""
    assert tokens.q_segments_BT is not None and tokens.kv_segments_BS is not None
    q_BT1, kv_B1S = _pair(tokens.q_segments_BT, tokens.kv_segments_BS, queries, keys)
    return (q_BT1 == kv_B1S) & (q_BT1 != 0)


def _pair(q_BT: jax.Array, kv_BS: jax.Array, queries: range, keys: range) -> tuple[jax.Array, jax.Array]:
    """Slice and reshape for broadcasting: queries as a column, keys as a row."""
    return q_BT[:, queries.start : queries.stop, None], kv_BS[:, None, keys.start : keys.stop]
