"""Decode attention over a paged KV cache: one new token per row, without gathering its pages first.

A kernel takes the fused QKV heads, applies rotary embeddings, writes the new keys and values to their pages and attends
over the cache. BACKENDS is the capability table (kernels/dispatch.py); calls that no backend supports use the generic
attention path.

Shapes: B rows, N query heads, K key and value heads, G = N / K, M = N + 2K, S split-K partial sums, H head size,
P pages, Z tokens of a page, W pages of a row. A mesh that splits rows splits pages with them: a row's pages are on its
devices, and its table numbers them from the first page there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.dispatch import CallSpec, Capability, Operation
from maxhydra.kernels.paged_attention import pages, pallas_tpu, triton
from maxhydra.kernels.paged_attention.pages import Pages
from maxhydra.kernels.placement import Placement

__all__ = ["BACKENDS", "OPERATION", "Backend", "Call", "Pages", "find_backend", "paged_attention", "write_prompts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Queries over a paged KV cache."""

    storage: str
    head_dim: int
    page_size: int
    num_elements: int
    """Elements of the key cache on each device."""
    has_split_groups: bool = False
    """Query heads are on other devices than the key heads they share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend. All need a cache with the dtype of the queries."""

    run: Callable[..., tuple[jax.Array, Pages]]
    powers_of_two: bool
    """Whether head and page sizes must be powers of two, and heads at least 16."""
    page_multiple: int
    max_elements: int | None
    """Elements of the key cache; None: any number."""
    prefill_write: Callable[..., Pages] | None = None
    """The kernel that writes prompts into their pages; None: not available."""

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        is_power = _is_power_of_two(call.head_dim) and call.head_dim >= 16 and _is_power_of_two(call.page_size)
        return (
            (call.storage == call.dtype, f"takes a cache of the queries' dtype {call.dtype}, not {call.storage}"),
            (
                is_power or not self.powers_of_two,
                f"takes head and page sizes that are powers of two, not {call.head_dim} and {call.page_size}",
            ),
            (
                call.page_size % self.page_multiple == 0,
                f"takes pages in multiples of {self.page_multiple} tokens, not {call.page_size}",
            ),
            (not call.has_split_groups, "needs query and key heads sharded alike"),
            (
                call.num_elements <= (self.max_elements or call.num_elements),
                "takes a cache that 32-bit indices can address",
            ),
        )


BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.attention,
        platforms=("gpu",),
        splits=("batch", "heads"),
        dtypes=("bfloat16", "float16", "float32"),
        powers_of_two=True,
        page_multiple=1,
        max_elements=2**31 - 1,
        prefill_write=pages.write_prompts,
    ),
    "pallas_tpu": Backend(
        run=pallas_tpu.attention,
        platforms=("tpu",),
        splits=("batch", "heads"),
        dtypes=("bfloat16", "float32"),
        powers_of_two=False,
        page_multiple=pallas_tpu.PAGE_MULTIPLE,
        max_elements=None,
    ),
}
OPERATION: Operation[Call, Backend] = Operation("paged_attention", BACKENDS)


def find_backend(pages: Pages, dtype: str, place: Placement) -> str | None:
    """Return the backend that serves one token per row in this dtype, or None if there is none."""
    keys = pages.key_PKZH
    *_, K, Z, H = keys.shape
    place = place.dividing(kv_heads=K)
    call = Call(
        platform=place.platform,
        splits=place.splits("batch", "kv_heads"),
        dtype=dtype,
        storage=keys.dtype.name,
        head_dim=H,
        page_size=Z,
        num_elements=keys.size // (place.num_shards("batch") * place.num_shards("kv_heads")),
        has_split_groups=place.spec("heads") != place.spec("kv_heads"),
    )
    return OPERATION.find(call)


def paged_attention(
    heads_SBMH: jax.Array,
    rope_factors: tuple[jax.Array, jax.Array] | None,
    pages: Pages,
    request: Request,
    *,
    then: jax.Array | None,
    backend: str,
    place: Placement | None = None,
) -> tuple[jax.Array, Pages]:
    """Return the attention outputs [B, N, H] of the new tokens, zeros for empty rows, and the updated pages.

    heads: queries, keys and values of the new tokens as split-K partial sums, whose sum is rounded to the cache's
    dtype. rope_factors: a pair (c, s) of [B, H] arrays: queries and keys x become c * x + s * y, where y is x with the
    halves of a head swapped; None: no rotary embedding. then: the weight [N, K] that multiplies the output, for the
    kernel to prefetch into L2; None if unknown. place: None is one device of the platform that JAX runs on; over a mesh
    each device has the pages of its rows and heads.
    """
    row, place = BACKENDS[backend], place or Placement.here()
    if not place.free_axes:
        return row.run(heads_SBMH, rope_factors, pages, request, then=then)
    K = pages.key_PKZH.shape[1]
    N = heads_SBMH.shape[2] - 2 * K

    def on_device(qkv: list[jax.Array], rope_factors: Any, pages: Pages) -> tuple[jax.Array, Pages]:
        return row.run(jnp.concatenate(qkv, axis=2), rope_factors, pages, request, then=None)

    heads, own_pages = place.spec(None, "batch", "heads"), _page_specs(place)
    specs = ([heads] * 3, place.spec("batch"), own_pages)
    run = place.manual(on_device, specs, (place.spec("batch", "heads"), own_pages))
    return run(jnp.split(heads_SBMH, (N, N + K), axis=2), rope_factors, pages)


def _page_specs(place: Placement) -> Pages:
    keys: Any = place.spec("batch", "kv_heads")
    return Pages(keys, keys, place.spec("batch"), place.spec("batch"))  # type: ignore[arg-type]


def write_prompts(pages: Pages, key_BTKH: jax.Array, value_BTKH: jax.Array, place: Placement) -> Pages | None:
    """Write prompts [B, T, K, H], of which `length_B` tokens are valid, to the start of their rows.

    Returns the updated pages, or None if no kernel supports this.
    """
    name, T, Z = find_backend(pages, key_BTKH.dtype.name, place), key_BTKH.shape[1], pages.key_PKZH.shape[2]
    write = None if name is None else BACKENDS[name].prefill_write
    is_supported = key_BTKH.shape == value_BTKH.shape and T % Z == 0
    if write is None or not is_supported:
        return None
    tokens, own_pages = place.spec("batch", None, "kv_heads"), _page_specs(place)
    return place.manual(write, (own_pages, tokens, tokens), own_pages)(pages, key_BTKH, value_BTKH)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
