"""The kernel over pages against the oracle over the same keys and values in a row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from maxhydra.config.schema.model import Pairs
from maxhydra.kernels.attention.reference import attention as reference
from maxhydra.kernels.attention.spec import Request, TokenInfo
from maxhydra.kernels.paged_attention import Pages, pallas_tpu, prefill_write, triton
from maxhydra.layers.rope import Rotation, rotate, turns

PAGES, PAGE = 40, 4


def request(**changes: float | int | None) -> Request:
    fields = {"scale": 0.3, "causal": True, "window": None, "chunk": None, "softcap": None, "softmax_dtype": "float32"}
    return Request(**{**fields, **changes}, is_length_split=False)  # type: ignore[arg-type]


def expected(q_BKGH: np.ndarray, pages: Pages, asked: Request) -> np.ndarray:
    """Each row alone, its pages gathered by NumPy."""
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
        found = reference(jnp.asarray(q_BKGH[b].reshape(1, 1, K * G, H)), key, value, asked, tokens, None)
        out[b] = np.asarray(found).reshape(K, G, H)
    return out


CHANGES = [{}, {"window": 9}, {"softcap": 2.0}]
TILES = [
    None,
    triton.Tile(8, 3, warps=2, stages=3, has_table=False),
    triton.Tile(2, 2, warps=1, stages=3, has_table=True),
    triton.Tile(32, 1, warps=8, stages=1, has_table=False),
]


@pytest.mark.parametrize(("changes", "turned"), [(CHANGES[0], False), (CHANGES[1], True), (CHANGES[2], True)])
@pytest.mark.parametrize("by", TILES)
def test_pages_give_what_a_row_gives(changes: dict[str, float], turned: bool, by: triton.Tile | None) -> None:
    """All at once, and in parts of several blocks."""
    assert_pages_give_what_a_row_gives(partial(triton.attention, by=by), changes, turned)


@pytest.mark.parametrize("changes", CHANGES)
def test_pages_on_a_tpu_give_what_a_row_gives(changes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages at a time."""
    monkeypatch.setattr(pallas_tpu, "BLOCK", 8)
    assert_pages_give_what_a_row_gives(pallas_tpu.attention, changes, turned=not changes)


@pytest.mark.parametrize("run", [triton.attention, pallas_tpu.attention])
def test_pages_in_bfloat16_give_what_a_row_gives(run: Callable[..., Any]) -> None:
    assert_pages_give_what_a_row_gives(run, {}, turned=True, dtype=jnp.bfloat16, tolerance=0.02)


def test_prompts_fill_their_pages() -> None:
    """Whole pages of every row, as far as it has tokens and the table goes; others stay as they are."""
    rng = np.random.default_rng(0)
    B, K, H, W = 4, 2, 16, 3
    key, value = (rng.standard_normal((PAGES, K, PAGE, H)).astype(np.float32) for _ in range(2))
    table, lengths = rng.permutation(PAGES)[: B * W].reshape(B, W), np.array([16, 0, 5, 8])
    new = [rng.standard_normal((B, 16, K, H)).astype(np.float32) for _ in range(2)]
    pages = Pages(*(jnp.asarray(x) for x in (key, value, table, lengths)))
    after = prefill_write.filled(pages, *map(jnp.asarray, new), interpret=True)
    for b, length in enumerate(lengths):
        for w in range(min(-(-length // PAGE), W)):
            for old, own in zip((key, value), new, strict=True):
                old[table[b, w]] = own[b, w * PAGE : (w + 1) * PAGE].swapaxes(0, 1)
    np.testing.assert_array_equal(after.key_PKZH, key)
    np.testing.assert_array_equal(after.value_PKZH, value)


def assert_pages_give_what_a_row_gives(
    run: Callable[..., Any],
    changes: dict[str, float],
    turned: bool,
    dtype: DTypeLike = np.float32,
    tolerance: float = 1e-5,
) -> None:
    """Rows of every length, one of them empty, over pages in any order. The last token of each is new, comes as parts
    of a sum, and is written on the way."""
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
    turn = turns(jnp.asarray(lengths - 1), rotation) if turned else None
    found, after = run(jnp.asarray(parts), turn, pages, request(**changes), interpret=True)

    q, new_key, new_value = np.split(heads, [K * G, K * G + K], axis=1)
    if turned:
        q, new_key = (
            np.asarray(rotate(jnp.asarray(x)[:, None], jnp.asarray(lengths - 1)[:, None], rotation))[:, 0]
            for x in (q, new_key)
        )
    for b, length in enumerate(lengths):
        if length:
            place = table[b, (length - 1) // PAGE], slice(None), (length - 1) % PAGE
            key[place], value[place] = new_key[b], new_value[b]
    np.testing.assert_allclose(after.key_PKZH.astype(np.float32), key, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(after.value_PKZH.astype(np.float32), value, rtol=tolerance, atol=tolerance)
    written = pages._replace(key_PKZH=key, value_PKZH=value)
    wanted = expected(q.reshape(B, K, G, H), written, request(**changes)).reshape(B, K * G, H)
    np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=tolerance, atol=tolerance)
