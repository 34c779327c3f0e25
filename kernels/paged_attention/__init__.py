"""Attention of a new token of each row over keys and values that lie in pages, without bringing them together first.

A kernel takes the heads as one product makes them, turns them by their positions, writes the new keys and values to
their pages and gathers what the queries see. BACKENDS says what serves what; what none serves goes the way of
other attention.

Shapes: B rows, N query heads, K key and value heads, G = N / K, M = N + 2K, S parts of a sum, H head size, P pages, Z
tokens of a page, W pages of a row.
"""

import dataclasses
from collections.abc import Callable

import jax

from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.capability import CallSpec, Capability
from maxhydra.kernels.paged_attention import pallas_tpu, prefill_write, triton
from maxhydra.kernels.paged_attention.pages import Pages
from maxhydra.kernels.placement import Placement

__all__ = ["BACKENDS", "Backend", "Call", "Pages", "filled", "paged_attention", "serving"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Queries over a cache in pages."""

    storage: str
    head_dim: int
    page_size: int
    numbers: int
    """Numbers among all keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """One row of the capability table. All run over a cache in the format of the queries."""

    run: Callable[..., tuple[jax.Array, Pages]]
    powers_of_two: bool
    """Whether head and page sizes must be such, heads of 16 at least."""
    page_multiple: int
    max_numbers: int | None
    """Among all keys; None: any."""
    fill: Callable[..., Pages] | None = None
    """The kernel that writes the beginnings of rows; None: there is none."""

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
        is_power = _is_power_of_two(call.head_dim) and call.head_dim >= 16 and _is_power_of_two(call.page_size)
        return (
            (call.storage == call.dtype, f"takes a cache like its queries, not {call.storage}"),
            (
                is_power or not self.powers_of_two,
                f"takes heads and pages of 2^n, not {call.head_dim} and {call.page_size}",
            ),
            (
                call.page_size % self.page_multiple == 0,
                f"takes pages in multiples of {self.page_multiple} tokens, not {call.page_size}",
            ),
            (call.numbers <= (self.max_numbers or call.numbers), "takes a cache that 32 bits can address"),
        )


BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.attention,
        platforms=("gpu",),
        devices=1,
        dtypes=("bfloat16", "float16", "float32"),
        powers_of_two=True,
        page_multiple=1,
        max_numbers=2**31 - 1,
        fill=prefill_write.filled,
    ),
    "pallas_tpu": Backend(
        run=pallas_tpu.attention,
        platforms=("tpu",),
        devices=1,
        dtypes=("bfloat16", "float32"),
        powers_of_two=False,
        page_multiple=pallas_tpu.PAGE_MULTIPLE,
        max_numbers=None,
    ),
}


def serving(pages: Pages, dtype: str, place: Placement) -> str | None:
    """The backend that takes one token a row in this number format; None where there is none."""
    keys = pages.key_PKZH
    *_, Z, H = keys.shape
    call = Call(
        platform=place.platform,
        devices=place.devices,
        dtype=dtype,
        storage=keys.dtype.name,
        head_dim=H,
        page_size=Z,
        numbers=keys.size,
    )
    return next((name for name, row in BACKENDS.items() if not row.refusals(call)), None)


def paged_attention(
    heads_SBMH: jax.Array,
    turns: tuple[jax.Array, jax.Array] | None,
    pages: Pages,
    request: Request,
    *,
    then: jax.Array | None,
    backend: str,
) -> tuple[jax.Array, Pages]:
    """Values [B, N, H] that the new token of each row gathers, and the pages with it; zeros for a row of no tokens.

    heads: queries, keys, values of the new tokens, as parts whose sum they are, rounded to the cache's format. Queries
    and keys x become x * turns[0] + y * turns[1], each [B, H], where y is x with the halves of a head exchanged; None:
    they stay as they are. `then`: the weight [N, K] that the values meet, to be asked for meanwhile where it is known.
    """
    return BACKENDS[backend].run(heads_SBMH, turns, pages, request, then=then)


def filled(pages: Pages, key_BTKH: jax.Array, value_BTKH: jax.Array, place: Placement) -> Pages | None:
    """The pages with tokens [B, T, K, H] that begin their rows, of which `length_B` are there; None where no kernel
    writes them."""
    name, T, Z = serving(pages, key_BTKH.dtype.name, place), key_BTKH.shape[1], pages.key_PKZH.shape[2]
    fill = None if name is None else BACKENDS[name].fill
    is_alike = key_BTKH.shape == value_BTKH.shape and T % Z == 0
    return fill(pages, key_BTKH, value_BTKH) if fill is not None and is_alike else None


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
