"""L2 prefetch of a weight: the slices, and lowering a kernel with it for a GPU."""

import jax
import jax.numpy as jnp
import pytest

from maxhydra.kernels import ptx
from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.paged_attention import Pages, triton

BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "capability", lambda: "9.0")


def lowered(rows: int, tokens: int) -> str:
    """Lowered paged attention with 8 key heads, before a matmul with a 2,048 x 2,048 weight."""
    request = Request(scale=1.0, causal=True, window=None, chunk=None, softcap=None, softmax_dtype="float32")

    def run(heads: jax.Array, pages: Pages, then: jax.Array) -> tuple[jax.Array, Pages]:
        return triton.attention(heads, None, pages, request, then=then)

    cache, table = jax.ShapeDtypeStruct((64, 8, 16, 64), BFLOAT16), (rows, tokens // 16)
    pages = Pages(cache, cache, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (table, (rows,))))  # type: ignore[arg-type]
    heads, weight = (jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in ((1, rows, 48, 64), (2048, 2048)))
    return str(jax.jit(run).trace(heads, pages, weight).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.usefixtures("hopper")
def test_programs_prefetch_a_weight_in_equal_slices() -> None:
    """Slices have the granularity of the instruction; a weight larger than the cache is not prefetched."""
    small, large = (jax.ShapeDtypeStruct((size, 2048), BFLOAT16) for size in (2048, 16384))
    assert ptx.L2Prefetch.of(small, programs=512, warps=1) == (16384, 32)  # type: ignore[arg-type]
    assert ptx.L2Prefetch.of(small, programs=500, warps=2) == (16768, 64)  # type: ignore[arg-type]
    assert ptx.L2Prefetch.of(large, programs=512, warps=1) is None  # type: ignore[arg-type]


@pytest.mark.usefixtures("hopper")
def test_only_kernels_of_many_programs_prefetch() -> None:
    instruction = "cp.async.bulk.prefetch.L2"
    assert instruction in lowered(64, 128)
    assert instruction not in lowered(2, 128)


def test_other_devices_do_not_prefetch() -> None:
    assert "cp.async.bulk.prefetch.L2" not in lowered(64, 128)
