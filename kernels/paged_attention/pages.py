"""The paged KV cache of a batch, and a GPU kernel that writes prompts into it, in Pallas for Triton.

A program copies one page of one head. Keys and values of 4,096 tokens, 8 heads of 64, take 9.7 us on an H200; XLA's
scatters take 13.7. Shape letters as in the package, T tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Pages(NamedTuple):
    """Key and value pages of many sequences, and the page table of each row."""

    key_PKZH: jax.Array
    value_PKZH: jax.Array
    table_BW: jax.Array
    """Pages of each row in token order; entries beyond its length are arbitrary."""
    length_B: jax.Array
    """Tokens of each row including the new one, which is not in the cache yet; 0 for an empty row."""


# Elements of a page and head per warp.
ELEMENTS_PER_WARP = 1024


def write_prompts(pages: Pages, key_BTKH: jax.Array, value_BTKH: jax.Array, *, interpret: bool = False) -> Pages:
    """Write tokens to the start of their rows; the last page of a row also receives the padding after its tokens."""
    (P, K, Z, H), (B, W) = pages.key_PKZH.shape, pages.table_BW.shape
    pages_spec = pl.BlockSpec((P, None, Z, H), lambda b, w, k: (0, k, 0, 0))
    tokens = pl.BlockSpec((None, Z, None, H), lambda b, w, k: (b, w, k, 0))
    row, scalar = pl.BlockSpec((None, W), lambda b, w, k: (b, 0)), pl.BlockSpec((None,), lambda b, w, k: (b,))
    stored = jax.ShapeDtypeStruct(pages.key_PKZH.shape, pages.key_PKZH.dtype)
    key_PKZH, value_PKZH = pl.pallas_call(
        _kernel,
        grid=(B, min(key_BTKH.shape[1] // Z, W), K),
        in_specs=[pages_spec, pages_spec, tokens, tokens, row, scalar],
        out_specs=[pages_spec, pages_spec],
        out_shape=[stored, stored],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=max(Z * H // ELEMENTS_PER_WARP, 1), num_stages=1),
        interpret=interpret,
        name="paged_prefill_write",
    )(pages.key_PKZH, pages.value_PKZH, key_BTKH, value_BTKH, pages.table_BW, pages.length_B)
    return pages._replace(key_PKZH=key_PKZH, value_PKZH=value_PKZH)


def _kernel(
    _keys: Any, _values: Any, key_ref: Any, value_ref: Any, table_ref: Any, length_ref: Any, *out_refs: Any
) -> None:
    w, Z = pl.program_id(1), key_ref.shape[0]
    page, is_valid = table_ref[w], jnp.full(key_ref.shape, w * Z < length_ref[...])
    for ref, new_ref in zip(out_refs, (key_ref, value_ref), strict=True):
        plt.store(ref.at[page, :, :], new_ref[...], mask=is_valid)
