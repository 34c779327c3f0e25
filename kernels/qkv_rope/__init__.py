"""Splits a fused QKV projection into heads and applies rotary position embeddings to queries and keys.

`qkv_rope` is the entry point; BACKENDS is its capability table, fastest first (kernels/dispatch.py). B batch, T tokens,
N query heads, K key and value heads, A = N + 2K heads of the projection, H head size, F = H / 2 pairs.
"""

import dataclasses
import math
from typing import Protocol

import jax

from maxhydra.kernels.dispatch import CallSpec, Capability, Operation, UnsupportedError, either
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.qkv_rope import reference, triton
from maxhydra.kernels.tiles import Sizes, with_sizes

__all__ = ["BACKENDS", "OPERATION", "Backend", "Call", "UnsupportedError", "qkv_rope"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Tokens of all sequences, with heads of this size."""

    tokens: int
    """On each device."""
    head_dim: int


class Run(Protocol):
    def __call__(
        self, heads_MAH: jax.Array, cos_MF: jax.Array, sin_MF: jax.Array, *, num_heads: int, num_kv_heads: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend."""

    run: Run
    token_multiple: int = 1
    head_dims: tuple[int, ...] | None = None
    """None: any."""

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                call.tokens % self.token_multiple == 0,
                f"takes tokens in multiples of {self.token_multiple}, not {call.tokens}",
            ),
            (
                self.head_dims is None or call.head_dim in self.head_dims,
                f"takes heads of {either(self.head_dims or ())}, not {call.head_dim}",
            ),
        )


# Fastest first.
BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.qkv_rope,
        platforms=("gpu",),
        splits=("batch", "length"),
        dtypes=("bfloat16", "float16"),
        token_multiple=triton.TOKEN_MULTIPLE,
        head_dims=(64, 128, 256),
        tile_extents=lambda call: triton.tile_extents(call.tokens),
    ),
    # XLA compiles the reference formula to good kernels.
    "xla": Backend(run=reference.qkv_rope),
    "reference": Backend(run=reference.qkv_rope),
}
OPERATION: Operation[Call, Backend] = Operation("qkv_rope", BACKENDS)


@OPERATION.record_calls
def qkv_rope(
    heads_BTAH: jax.Array,
    cos_BTF: jax.Array,
    sin_BTF: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    backend: str,
    sizes: Sizes = (),
    place: Placement | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries [B, T, N, H], keys and values [B, T, K, H]; the two halves of a head are rotated in float32.

    Positions are not learned: cosines and sines get no gradient. sizes: requested tile sizes. place: None is one device
    of the platform that JAX runs on.
    """
    (B, T, _, H), names = heads_BTAH.shape, ("batch", "length")
    place = (place or Placement.here()).dividing(batch=B, length=T)
    call = Call(
        platform=place.platform,
        splits=place.splits(*names),
        dtype=heads_BTAH.dtype.name,
        tokens=B * T // math.prod(map(place.num_shards, names)),
        head_dim=H,
        sizes=sizes,
    )
    row = OPERATION.select(backend, call)
    run = with_sizes(row.run, sizes)

    def on_device(heads_BTAH: jax.Array, cos_BTF: jax.Array, sin_BTF: jax.Array) -> tuple[jax.Array, ...]:
        B, T, A, H = heads_BTAH.shape
        q_k_v = run(
            heads_BTAH.reshape(B * T, A, H),
            jax.lax.stop_gradient(cos_BTF).reshape(B * T, -1),
            jax.lax.stop_gradient(sin_BTF).reshape(B * T, -1),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
        return tuple(heads.reshape(B, T, -1, H) for heads in q_k_v)

    tokens = place.spec(*names)
    mapped = row.map_shards(on_device, place, in_specs=(tokens,) * 3, out_specs=(tokens,) * 3)
    q_BTNH, k_BTKH, v_BTKH = mapped(heads_BTAH, cos_BTF, sin_BTF)
    return q_BTNH, k_BTKH, v_BTKH
