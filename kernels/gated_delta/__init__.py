"""The gated delta rule (Yang et al., 2024): a recurrent state per head that every token decays, updates and reads.

`gated_delta` is the entry point; BACKENDS is its capability table, fastest first (kernels/dispatch.py).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.kernels.dispatch import CallSpec, Capability, Operation, UnsupportedError, either
from maxhydra.kernels.gated_delta import chunked, pallas_tpu, spec, triton
from maxhydra.kernels.gated_delta.over_length import over_length
from maxhydra.kernels.gated_delta.spec import Inputs, masked
from maxhydra.kernels.placement import Placement

__all__ = ["BACKENDS", "OPERATION", "Backend", "Call", "UnsupportedError", "gated_delta"]

Run = Callable[[Inputs], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Sequences of this length; `dtype` is that of the values."""

    is_auto: bool
    length: int
    head_dims: tuple[int, int]
    """Sizes of a key and of a value."""
    states: int
    """Elements of all inter-chunk states on a device: the largest array of the computation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend."""

    run: Run
    fastest_to: int | None = None
    """Largest number of tokens for which `auto` selects it; None: any."""
    fastest_dtypes: tuple[str, ...] | None = None
    """Dtypes for which `auto` selects it; None: all."""
    head_dims: tuple[int, ...] | None = None
    """Supported sizes of keys and values; None: any."""
    max_states: int | None = None

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                not call.is_auto or call.length <= (self.fastest_to or call.length),
                f"is selected for up to {self.fastest_to} tokens",
            ),
            (
                not call.is_auto or call.dtype in (self.fastest_dtypes or self.dtypes),
                f"is not known to be the fastest in {call.dtype}",
            ),
            (
                self.head_dims is None or set(call.head_dims) <= set(self.head_dims),
                f"takes keys and values of {either(self.head_dims or ())}, not {either(call.head_dims)}",
            ),
            (
                self.max_states is None or call.states <= self.max_states,
                f"takes states of up to {self.max_states} elements, not {call.states}",
            ),
        )


# Fastest first. A single token is one step of the recurrence, for which the reference is optimal.
BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=spec.gated_delta, fastest_to=1),
    "pallas_tpu": Backend(run=pallas_tpu.gated_delta, platforms=("tpu",), splits=("batch", "length", "heads")),
    "triton": Backend(
        run=triton.gated_delta,
        platforms=("gpu",),
        dtypes=tuple(triton.PARAMS),
        fastest_dtypes=("bfloat16",),
        head_dims=triton.HEAD_DIMS,
        splits=("batch", "length", "heads"),
        max_states=2**31 - 1,
    ),
    "chunked": Backend(run=chunked.gated_delta),
}
OPERATION: Operation[Call, Backend] = Operation("delta", BACKENDS)
# Dimensions of the arguments that may be split over devices.
SPLIT = ("batch", "length", "kv_heads")


@OPERATION.record_calls
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
    place: Placement | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of the tokens [B, T, N, V] and the state [B, N, K, V] after the last one, both in float32.

    N value heads, ordered by the M key heads that they share. Segment 0 is padding; every other segment starts from a
    zero state, except the first of a row, which continues from the given state. place: None is one device of the
    platform that JAX runs on.
    """
    B, T, M, K = query_BTMK.shape
    N, V = value_BTNV.shape[2:]
    if key_BTMK.shape != (B, T, M, K) or N % M:
        raise ValueError(
            f"incompatible shapes: queries {query_BTMK.shape}, keys {key_BTMK.shape}, values {value_BTNV.shape}; "
            "keys must have the shape of queries, and key heads must divide value heads"
        )
    groups = (M, N // M)
    if state_BNKV is None:
        state_BNKV = jnp.zeros((B, N, K, V), jnp.float32)
    inputs = Inputs(
        query_BTMK=query_BTMK,
        key_BTMK=key_BTMK,
        value_BTMGV=value_BTNV.reshape(B, T, *groups, V),
        log_decay_BTMG=log_decay_BTN.astype(jnp.float32).reshape(B, T, *groups),
        rate_BTMG=rate_BTN.astype(jnp.float32).reshape(B, T, *groups),
        state_BMGKV=state_BNKV.reshape(B, *groups, K, V),
        starts_BT=None,
    )
    place = (place or Placement.here()).dividing(batch=B, length=T, kv_heads=M)
    call = Call(
        platform=place.platform,
        splits=place.splits(*SPLIT),
        dtype=value_BTNV.dtype.name,
        is_auto=backend == "auto",
        length=T,
        head_dims=(K, V),
        states=B * N * -(-T // chunked.CHUNK) * K * V // math.prod(map(place.num_shards, SPLIT)),
    )
    run = _over_devices(OPERATION.select(backend, call), place)
    out_BTMGV, state_BMGKV = run(masked(inputs, segments_BT))
    return out_BTMGV.reshape(B, T, N, V), state_BMGKV.reshape(B, N, K, V)


def _over_devices(row: Backend, place: Placement) -> Run:
    if place.num_shards("length") > 1:
        return over_length(row.run, place)
    heads, state = place.spec("batch", None, "kv_heads"), place.spec("batch", "kv_heads")
    specs: Any = Inputs(heads, heads, heads, heads, heads, state, place.spec("batch"))  # type: ignore[arg-type]
    return row.map_shards(row.run, place, in_specs=(specs,), out_specs=(heads, state))
