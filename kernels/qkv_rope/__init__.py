"""Query, key and value heads out of one product of all three, the first two turned by rotary positions.

`qkv_rope` is the one way in. BACKENDS says what serves what, fastest first: `auto` takes the first that serves the
call, and a backend that was asked for by name and cannot is an error. B batch, T tokens, N query heads, K key and value
heads, A = N + 2K heads of the product, H head size, F = H / 2 pairs.
"""

import dataclasses
from typing import Protocol

import jax

from maxhydra.kernels.call_recorder import watched
from maxhydra.kernels.capability import CallSpec, Capability
from maxhydra.kernels.dispatch import UnsupportedError, chosen, either
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.qkv_rope import reference, triton
from maxhydra.kernels.tiles import Sizes, sized

__all__ = ["BACKENDS", "Backend", "Call", "UnsupportedError", "choose", "qkv_rope"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """So many tokens with heads of this size."""

    tokens: int
    head_dim: int


class Run(Protocol):
    def __call__(
        self, heads_MAH: jax.Array, cos_MF: jax.Array, sin_MF: jax.Array, *, num_heads: int, num_kv_heads: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """One row of the capability table."""

    run: Run
    token_multiple: int = 1
    head_dims: tuple[int, ...] | None = None
    """None: any."""

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
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
        devices=1,
        dtypes=("bfloat16", "float16"),
        token_multiple=triton.MULTIPLE,
        head_dims=(64, 128, 256),
        cut=lambda call: triton.cut(call.tokens),
    ),
    # XLA makes kernels of the formula as it stands.
    "xla": Backend(run=reference.qkv_rope),
    "reference": Backend(run=reference.qkv_rope),
}


def choose(backend: str, call: Call) -> str:
    """The backend that serves the call: the one asked for, or under `auto` the fastest that can."""
    return chosen("qkv_rope", backend, {name: row.refusals(call) for name, row in BACKENDS.items()})


@watched
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
    """Queries [B, T, N, H], keys and values [B, T, K, H]: pairs of the halves of a head, turned in float32.

    Positions are not learned: cosines and sines have no gradient. sizes: asked of the kernel's tile. place: None is one
    device of the platform that JAX runs on.
    """
    B, T, A, H = heads_BTAH.shape
    place = place or Placement.here()
    dtype = heads_BTAH.dtype.name
    call = Call(platform=place.platform, devices=place.devices, dtype=dtype, tokens=B * T, head_dim=H, sizes=sizes)
    run = sized(BACKENDS[choose(backend, call)].run, sizes)
    parts = run(
        heads_BTAH.reshape(B * T, A, H),
        jax.lax.stop_gradient(cos_BTF).reshape(B * T, -1),
        jax.lax.stop_gradient(sin_BTF).reshape(B * T, -1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    q_BTNH, k_BTKH, v_BTKH = (part.reshape(B, T, -1, H) for part in parts)
    return q_BTNH, k_BTKH, v_BTKH
