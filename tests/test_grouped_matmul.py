"""The grouped product's kernels in interpret mode against NumPy, and what the table says of them."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.kernels.grouped_matmul import Call, UnsupportedError, choose, megablox, triton

TILE = triton.Tile(rows=16, columns=16, summed=16, warps=4, stages=1, band=3)
M, K, N = 48, 16, 32
KERNELS = {
    "triton": partial(triton.grouped_matmul, tiles=triton.Tiles(TILE, TILE), interpret=True),
    "megablox": partial(megablox.grouped_matmul, columns=16, interpret=True),
}

LARGE = {"devices": 1, "dtype": "bfloat16", "rows": 256, "groups": 8, "inputs": 128}


def by_hand(x: np.ndarray, w: np.ndarray, d_out: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, ...]:
    out, d_x, d_w = np.zeros((M, N)), np.zeros((M, K)), np.zeros((4, K, N))
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        out[rows], d_x[rows] = x[rows] @ w[group], d_out[rows] @ w[group].T
        d_w[group] = x[rows].T @ d_out[rows]
    return out, d_x, d_w


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_products_and_gradients_are_those_of_numpy(kernel: Callable[..., jax.Array], dtype: jnp.dtype) -> None:
    """Groups that share a tile, that fill several, that are empty; in the second call there are rows of no group."""
    rng = np.random.default_rng(0)
    x, w, d_out = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((M, K), (4, K, N), (M, N)))

    @jax.jit
    def run(x: jax.Array, w: jax.Array, d_out: jax.Array, sizes: jax.Array) -> tuple:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return kernel(x, w, sizes)

        out, pull_back = jax.vjp(product, x, w)
        return out, *pull_back(d_out)

    for sizes in ([9, 0, 29, 10], [1, 16, 3, 0]):
        wanted = by_hand(*(np.asarray(array, np.float64) for array in (x, w, d_out)), sizes)
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
        out, d_x, d_w = (np.asarray(array, np.float64) for array in run(x, w, d_out, jnp.asarray(sizes)))
        for got, want in zip((out[: sum(sizes)], d_x[: sum(sizes)], d_w), wanted, strict=True):
            np.testing.assert_allclose(got, want[: len(got)], rtol=tolerance, atol=tolerance)


def test_the_kernel_serves_large_shapes_on_a_gpu_and_says_why_not_otherwise() -> None:
    large = LARGE | {"platform": "gpu", "outputs": 192}
    assert choose("auto", Call(**large)) == "triton"
    for change, reason in (
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"rows": 100}, "in multiples of 64, not 100, 128, 192"),
        ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
        ({"inputs": 1 << 20, "outputs": 1 << 10}, "takes arrays of up to"),
    ):
        with pytest.raises(UnsupportedError, match=reason) as refused:
            choose("triton", Call(**{**large, **change}))
        assert refused.value.able == ("xla", "reference")
        assert choose("auto", Call(**{**large, **change})) == "xla"


def test_the_kernels_of_tpus_are_chosen_there() -> None:
    large = LARGE | {"platform": "tpu", "outputs": 384}
    assert choose("auto", Call(**large)) == "megablox"
    with pytest.raises(UnsupportedError, match="in multiples of 128, not 256, 192, 384"):
        choose("megablox", Call(**{**large, "inputs": 192}))
