"""Attention of a new token of each row over keys and values that lie in pages, without bringing them together first.

The kernel takes the heads as one product makes them, turns them by their positions, writes the new keys and values to
their pages and gathers what the queries see. `refusals` says why a call cannot be served; what is not served here goes
the way of other attention.

Shapes: B rows, N query heads, K key and value heads, G = N / K, M = N + 2K, H head size, P pages, Z tokens of a page, W
pages of a row.
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
    devices: int
    dtype: str
    storage: str
    head_dim: int
    page_size: int
    numbers: int
    """Numbers among all keys."""


def refusals(call: Call) -> tuple[str, ...]:
    """Why a call cannot be served; empty if it can."""
    needs = (
        (call.platform == "gpu", f"runs on gpu, not {call.platform}"),
        (call.devices == 1, f"runs on one device, not {call.devices}"),
        (call.dtype in DTYPES and call.storage == call.dtype, f"takes a cache like its queries, not {call.storage}"),
        (_is_power_of_two(call.head_dim) and call.head_dim >= 16, f"takes heads of 2^n, not {call.head_dim}"),
        (_is_power_of_two(call.page_size), f"takes pages of 2^n tokens, not {call.page_size}"),
        (call.numbers < 2**31, "takes a cache that 32 bits can address"),
    )
    return tuple(reason for is_met, reason in needs if not is_met)


def can_serve(pages: Pages, dtype: str, devices: int) -> bool:
    """Whether the kernel takes one token a row in this number format."""
    _, _, Z, H = pages.key_PKZH.shape
    storage, numbers = pages.key_PKZH.dtype.name, pages.key_PKZH.size
    return not refusals(Call(jax.default_backend(), devices, dtype, storage, H, Z, numbers))


def paged_attention(
    heads_BMH: jax.Array, turns: tuple[jax.Array, jax.Array] | None, pages: Pages, request: Request
) -> tuple[jax.Array, Pages]:
    """Values [B, N, H] that the new token of each row gathers, and the pages with it; zeros for a row of no tokens.

    heads: queries, keys, values of the new tokens. Queries and keys x become x * turns[0] + y * turns[1], each [B, H],
    where y is x with the halves of a head exchanged; None: they stay as they are.
    """
    return triton.attention(heads_BMH, turns, pages, request, interpret=False)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
