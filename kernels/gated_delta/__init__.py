"""The gated delta rule (Yang et al., 2024): a state per head that every token decays, corrects and reads.

`gated_delta` is the one way in; BACKENDS says what serves what, fastest first.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxhydra.kernels.gated_delta import chunked, reference
from maxhydra.kernels.gated_delta.request import Inputs, masked
from maxhydra.kernels.watch import watched

__all__ = ["BACKENDS", "Backend", "gated_delta"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """One row of the capability table."""

    run: Callable[[Inputs], tuple[jax.Array, jax.Array]]
    fastest_to: int | None = None
    """Tokens of a call up to which it is the fastest; None: any number."""


# Both serve every call, on every platform. A single token is a step of the recurrence, and nothing else.
BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=reference.gated_delta, fastest_to=1),
    "chunked": Backend(run=chunked.gated_delta),
}


@watched
def gated_delta(
    query_BTMK: jax.Array,
    key_BTMK: jax.Array,
    value_BTNV: jax.Array,
    *,
    log_decay_BTN: jax.Array,
    rate_BTN: jax.Array,
    state_BNKV: jax.Array | None,
    segments_BT: jax.Array | None,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """What the tokens read, [B, T, N, V], and the state [B, N, K, V] after the last of them, both in float32.

    N value heads, in the order of the M key heads that they share. Segment 0 is padding; every other begins with an
    empty state, except the first of a row, which goes on from the state given.
    """
    B, T, M, K = query_BTMK.shape
    N, V = value_BTNV.shape[2:]
    if key_BTMK.shape != (B, T, M, K) or N % M:
        raise ValueError(f"queries {query_BTMK.shape}, keys {key_BTMK.shape} and values {value_BTNV.shape} do not fit")
    heads = (M, N // M)
    if state_BNKV is None:
        state_BNKV = jnp.zeros((B, N, K, V), jnp.float32)
    inputs = Inputs(
        query_BTMK=query_BTMK.astype(jnp.float32),
        key_BTMK=key_BTMK.astype(jnp.float32),
        value_BTMGV=value_BTNV.astype(jnp.float32).reshape(B, T, *heads, V),
        log_decay_BTMG=log_decay_BTN.astype(jnp.float32).reshape(B, T, *heads),
        rate_BTMG=rate_BTN.astype(jnp.float32).reshape(B, T, *heads),
        state_BMGKV=state_BNKV.reshape(B, *heads, K, V),
        starts_BT=None,
    )
    name = _fastest(T) if backend == "auto" else backend
    out_BTMGV, state_BMGKV = BACKENDS[name].run(masked(inputs, segments_BT))
    return out_BTMGV.reshape(B, T, N, V), state_BMGKV.reshape(B, N, K, V)


def _fastest(length: int) -> str:
    return next(name for name, row in BACKENDS.items() if row.fastest_to is None or length <= row.fastest_to)
