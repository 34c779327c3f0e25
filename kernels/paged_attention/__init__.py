"""Attention of a new token of each row over keys and values that lie in pages, without bringing them together first.

`refusals` says why a call cannot be served; what is not served here is gathered and goes the way of other attention.

Shapes: B rows, N query heads, K key and value heads, G = N / K, H head size, P pages, Z tokens of a page, W pages of a
row.
"""

import dataclasses

import jax

from maxhydra.kernels.attention.request import Request
from maxhydra.kernels.paged_attention import triton
from maxhydra.kernels.paged_attention.pages import Pages

__all__ = ["Call", "Pages", "can_serve", "paged_attention", "refusals"]

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Call:
    """What the kernel must cope with."""

    platform: str
    dtype: str
    storage: str
    head_dim: int
    page_size: int
    numbers: int
    """Numbers among all keys."""
    devices: int


def refusals(call: Call) -> tuple[str, ...]:
    """Why a call cannot be served; empty if it can."""
    needs = (
        (call.platform == "gpu", f"runs on gpu, not {call.platform}"),
        (call.dtype in DTYPES and call.storage == call.dtype, f"takes a cache like its queries, not {call.storage}"),
        (_is_power_of_two(call.head_dim) and call.head_dim >= 16, f"takes heads of 2^n, not {call.head_dim}"),
        (_is_power_of_two(call.page_size), f"takes pages of 2^n tokens, not {call.page_size}"),
        (call.numbers < 2**31, "takes a cache that 32 bits can address"),
        (call.devices == 1, f"runs on one device, not {call.devices}"),
    )
    return tuple(reason for is_met, reason in needs if not is_met)


def can_serve(q_B1NH: jax.Array, pages: Pages, devices: int) -> bool:
    """Whether the kernel takes this call on the devices there are."""
    _, _, Z, H = pages.key_PKZH.shape
    call = Call(
        platform=jax.default_backend(),
        dtype=q_B1NH.dtype.name,
        storage=pages.key_PKZH.dtype.name,
        head_dim=H,
        page_size=Z,
        numbers=pages.key_PKZH.size,
        devices=devices,
    )
    return q_B1NH.shape[1] == 1 and not refusals(call)


def paged_attention(
    q_B1NH: jax.Array, new_key_B1KH: jax.Array, new_value_B1KH: jax.Array, pages: Pages, request: Request
) -> tuple[jax.Array, Pages]:
    """Values [B, 1, N, H] that the new token of each row gathers, and the pages with it; zeros for a row of no tokens."""
    B, _, N, H = q_B1NH.shape
    K = pages.key_PKZH.shape[1]
    q_BKGH = q_B1NH.reshape(B, K, N // K, H)
    out_BKGH, pages = triton.attention(
        q_BKGH, new_key_B1KH[:, 0], new_value_B1KH[:, 0], pages, request, interpret=False
    )
    return out_BKGH.reshape(B, 1, N, H), pages


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
