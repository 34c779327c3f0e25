"""The paged attention kernels against the oracle over the same keys and values in a contiguous row."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.typing import DTypeLike

from maxhydra.config.schema.model import Pairs
from maxhydra.kernels.attention.reference import attention as reference
from maxhydra.kernels.attention.spec import Request, TokenInfo
from maxhydra.kernels.paged_attention import BACKENDS, Pages, find_backend, paged_attention, pallas_tpu, triton
from maxhydra.kernels.paged_attention import pages as pages_module
from maxhydra.kernels.paged_attention import write_prompts as write_whole_prompts
from maxhydra.kernels.paged_attention.pages import write_prompts
from maxhydra.kernels.placement import Placement
from maxhydra.layers.rope import Rotation, paged_rope_factors, rotate

PAGES, PAGE = 40, 4


def make_request(**changes: float | int | None) -> Request:
    fields = {"scale": 0.3, "causal": True, "window": None, "chunk": None, "softcap": None, "softmax_dtype": "float32"}
    return Request(**{**fields, **changes})  # type: ignore[arg-type]


def expected(q_BKGH: np.ndarray, pages: Pages, request: Request) -> np.ndarray:
    """The reference for each row separately, with its pages gathered by NumPy."""
    K, G, H = q_BKGH.shape[1:]
    out = np.zeros(q_BKGH.shape, np.float32)
    for b, length in enumerate(np.asarray(pages.length_B)):
        if length == 0:
            continue
        table = np.asarray(pages.table_BW)[b]
        key, value = (
            np.asarray(x)[table].transpose(0, 2, 1, 3).reshape(-1, K, H)[None, :length]
            for x in (pages.key_PKZH, pages.value_PKZH)
        )
        tokens = TokenInfo(None, None, jnp.full((1, 1), length - 1), jnp.arange(length)[None])
        row = reference(jnp.asarray(q_BKGH[b].reshape(1, 1, K * G, H)), key, value, request, tokens, None)
        out[b] = np.asarray(row).reshape(K, G, H)
    return out


CHANGES = [{}, {"window": 9}, {"softcap": 2.0}]
TILES = [
    None,
    triton.Tile(8, 3, warps=2, stages=3, has_table=False),
    triton.Tile(2, 2, warps=1, stages=3, has_table=True),
    triton.Tile(32, 1, warps=8, stages=1, has_table=False),
]


@pytest.mark.slow
@pytest.mark.default_cases("None-changes1-True", "tile1-changes0-False")
@pytest.mark.parametrize(("changes", "rotated"), [(CHANGES[0], False), (CHANGES[1], True), (CHANGES[2], True)])
@pytest.mark.parametrize("tile", TILES)
def test_pages_equal_a_contiguous_row(changes: dict[str, float], rotated: bool, tile: triton.Tile | None) -> None:
    """With all tokens at once, and in splits of several blocks."""
    assert_pages_equal_a_contiguous_row(partial(triton.attention, tile=tile), changes, rotated)


@pytest.mark.slow
@pytest.mark.default_cases("changes0", "changes2")
@pytest.mark.parametrize("changes", CHANGES)
def test_pages_on_a_tpu_equal_a_contiguous_row(changes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages at a time."""
    monkeypatch.setattr(pallas_tpu, "BLOCK", 8)
    assert_pages_equal_a_contiguous_row(pallas_tpu.attention, changes, rotated=not changes)


@pytest.mark.slow
@pytest.mark.default_cases("attention0")
@pytest.mark.parametrize("run", [triton.attention, pallas_tpu.attention])
def test_pages_in_bfloat16_equal_a_contiguous_row(run: Callable[..., Any]) -> None:
    assert_pages_equal_a_contiguous_row(run, {}, rotated=True, dtype=jnp.bfloat16, tolerance=0.02)


def test_prompts_are_written_to_their_pages() -> None:
    """Whole pages of every row are written, up to its length and its table; other pages are unchanged."""
    rng = np.random.default_rng(0)
    B, K, H, W = 4, 2, 16, 3
    key, value = (rng.standard_normal((PAGES, K, PAGE, H)).astype(np.float32) for _ in range(2))
    table, lengths = rng.permutation(PAGES)[: B * W].reshape(B, W), np.array([16, 0, 5, 8])
    new = [rng.standard_normal((B, 16, K, H)).astype(np.float32) for _ in range(2)]
    pages = Pages(*(jnp.asarray(x) for x in (key, value, table, lengths)))
    after = write_prompts(pages, *map(jnp.asarray, new), interpret=True)
    for b, length in enumerate(lengths):
        for w in range(min(-(-length // PAGE), W)):
            for old, prompt in zip((key, value), new, strict=True):
                old[table[b, w]] = prompt[b, w * PAGE : (w + 1) * PAGE].swapaxes(0, 1)
    np.testing.assert_array_equal(after.key_PKZH, key)
    np.testing.assert_array_equal(after.value_PKZH, value)


def assert_pages_equal_a_contiguous_row(
    run: Callable[..., Any],
    changes: dict[str, float],
    rotated: bool,
    dtype: DTypeLike = np.float32,
    tolerance: float = 1e-5,
) -> None:
    """Rows of different lengths, one of them empty, over pages in any order.

    The last token of each row is new: it is given as split-K partial sums, and the kernel writes it to its page.
    """
    rng = np.random.default_rng(0)
    B, K, G, H, W = 5, 2, 3, 16, 7
    key, value = (rng.standard_normal((PAGES, K, PAGE, H)).astype(dtype).astype(np.float32) for _ in range(2))
    value[39] = np.nan
    table = rng.permutation(39)[: B * W].reshape(B, W)
    table[0, 1:] = 39
    lengths = np.array([3, 0, 28, 9, 17])
    indices = (jnp.asarray(x, jnp.int32) for x in (table, lengths))
    pages = Pages(jnp.asarray(key, dtype), jnp.asarray(value, dtype), *indices)
    parts = rng.standard_normal((3, B, K * G + 2 * K, H)).astype(np.float32)
    heads = parts.sum(axis=0).astype(dtype).astype(np.float32)
    rotation = Rotation(tuple(1000 ** (-i / 8) for i in range(8)), amplitude=1.3, pairs=Pairs.halves)
    turn = paged_rope_factors(jnp.asarray(lengths - 1), rotation) if rotated else None
    out, after = run(jnp.asarray(parts), turn, pages, make_request(**changes), interpret=True)

    q, new_key, new_value = np.split(heads, [K * G, K * G + K], axis=1)
    if rotated:
        q, new_key = (
            np.asarray(rotate(jnp.asarray(x)[:, None], jnp.asarray(lengths - 1)[:, None], rotation))[:, 0]
            for x in (q, new_key)
        )
    for b, length in enumerate(lengths):
        if length:
            slot = table[b, (length - 1) // PAGE], slice(None), (length - 1) % PAGE
            key[slot], value[slot] = new_key[b], new_value[b]
    np.testing.assert_allclose(after.key_PKZH.astype(np.float32), key, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(after.value_PKZH.astype(np.float32), value, rtol=tolerance, atol=tolerance)
    updated = pages._replace(key_PKZH=key, value_PKZH=value)
    reference_out = expected(q.reshape(B, K, G, H), updated, make_request(**changes)).reshape(B, K * G, H)
    np.testing.assert_allclose(out.astype(np.float32), reference_out, rtol=tolerance, atol=tolerance)


@pytest.mark.exhaustive
def test_split_heads_and_rows_equal_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that attends and the one that writes prompts; a row's pages are on its devices."""
    rng, (B, K, G, H) = np.random.default_rng(0), (2, 2, 2, 16)
    interpreted = dataclasses.replace(
        BACKENDS["triton"],
        run=partial(triton.attention, interpret=True),
        prefill_write=partial(pages_module.write_prompts, interpret=True),
        platforms=("cpu",),
    )
    monkeypatch.setitem(BACKENDS, "triton", interpreted)
    stored = [jnp.asarray(rng.standard_normal((PAGES, K, PAGE, H)), jnp.float32) for _ in range(2)]
    pages = Pages(*stored, jnp.asarray([[3, 7], [1, 9]]), jnp.asarray([5, 3]))
    heads = jnp.asarray(rng.standard_normal((1, B, (G + 2) * K, H)), jnp.float32)
    factors = tuple(jnp.asarray(rng.standard_normal((B, H)), jnp.float32) for _ in range(2))
    prompts = [jnp.asarray(rng.standard_normal((B, 2 * PAGE, K, H)), jnp.float32) for _ in range(2)]

    def run(place: Placement, pages: Pages = pages) -> Any:
        assert find_backend(pages, "float32", place) == "triton"
        attended = paged_attention(heads, factors, pages, make_request(), then=None, backend="triton", place=place)
        return attended, write_whole_prompts(pages, *prompts, place)

    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = Placement("cpu", mesh, heads="tensor", kv_heads="tensor")
    for got, want in zip(jax.tree.leaves(run(split)), jax.tree.leaves(run(Placement("cpu"))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # The second row's pages are in the second half of the pool, numbered from its start.
    half = PAGES // 2
    grouped = pages._replace(table_BW=jnp.asarray([[3, 2], [half + 1, half + 4]]))
    local = grouped._replace(table_BW=jnp.asarray([[3, 2], [1, 4]]))
    found = run(dataclasses.replace(split, batch="fsdp"), local)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(run(Placement("cpu"), grouped)), strict=True):
        if got.shape != local.table_BW.shape:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert find_backend(pages, "float32", dataclasses.replace(split, kv_heads=None)) is None
