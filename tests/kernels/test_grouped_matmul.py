"""The grouped matmul kernels against NumPy, in interpret mode and on the simulated GPU; their capability table."""

import dataclasses
import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxhydra.kernels.grouped_matmul as package
from maxhydra.kernels.dispatch import Operation
from maxhydra.kernels.grouped_matmul import (
    BACKENDS,
    OPERATION,
    Call,
    UnsupportedError,
    megablox,
    mosaic,
    row_copies,
    triton,
)
from maxhydra.kernels.grouped_matmul.mosaic import KernelParams
from maxhydra.kernels.grouped_matmul.tiles import grouped_matmul_pair_vjp, grouped_matmul_vjp, schedule
from tests.support.hopper import run

TILE = triton.Tile(rows=16, columns=16, contracted=16, warps=4, stages=1, band=3)
M, K, N = 48, 16, 32
KERNELS = {
    "triton": partial(triton.grouped_matmul, tiles=triton.Tiles(TILE, TILE), interpret=True),
    "megablox": partial(megablox.grouped_matmul, columns=16, interpret=True),
}

LARGE = {"capability": "8.0", "dtype": "bfloat16", "rows": 256, "groups": 8, "inputs": 128}


def numpy_grouped_matmul(x: np.ndarray, w: np.ndarray, d_out: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, ...]:
    out, d_x, d_w = np.zeros(d_out.shape), np.zeros(x.shape), np.zeros(w.shape)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        out[rows], d_x[rows] = x[rows] @ w[group], d_out[rows] @ w[group].T
        d_w[group] = x[rows].T @ d_out[rows]
    return out, d_x, d_w


@pytest.mark.slow
@pytest.mark.default_cases("triton-float32", "megablox-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_matmuls_and_gradients_equal_numpy(kernel: Callable[..., jax.Array], dtype: jnp.dtype) -> None:
    """Groups that share a tile, fill several, or are empty; the second call has rows of no group."""
    rng = np.random.default_rng(0)
    x, w, d_out = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((M, K), (4, K, N), (M, N)))

    @jax.jit
    def gradients(x: jax.Array, w: jax.Array, d_out: jax.Array, sizes: jax.Array) -> tuple:
        def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
            return kernel(x, w, sizes)

        out, pull_back = jax.vjp(matmul, x, w)
        return out, *pull_back(d_out)

    for sizes in ([9, 0, 29, 10], [1, 16, 3, 0]):
        expected = numpy_grouped_matmul(*(np.asarray(array, np.float64) for array in (x, w, d_out)), sizes)
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
        out, d_x, d_w = (np.asarray(array, np.float64) for array in gradients(x, w, d_out, jnp.asarray(sizes)))
        for got, want in zip((out[: sum(sizes)], d_x[: sum(sizes)], d_w), expected, strict=True):
            np.testing.assert_allclose(got, want[: len(got)], rtol=tolerance, atol=tolerance)


def test_the_kernel_serves_large_shapes_on_a_gpu_and_gives_the_reason_otherwise() -> None:
    large = LARGE | {"platform": "gpu", "outputs": 192}
    assert OPERATION.choose("auto", Call(**large)) == "triton"
    for change, reason in (
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"outputs": 200}, "in multiples of 16, not 128 and 200"),
        ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
        ({"inputs": 1 << 20, "outputs": 1 << 10}, "takes arrays of up to"),
    ):
        with pytest.raises(UnsupportedError, match=reason) as error:
            OPERATION.choose("triton", Call(**{**large, **change}))
        assert error.value.supported == ("xla", "reference")
        assert OPERATION.choose("auto", Call(**{**large, **change})) == "xla"


def test_a_backend_that_is_slow_on_the_device_is_selected_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    odd = LARGE | {"platform": "gpu", "capability": "9.0", "outputs": 2888}
    with caplog.at_level(logging.INFO, "maxhydra"):
        assert OPERATION.choose("auto", Call(**odd)) == "xla"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "not 128 and 2888" in record.message


@pytest.mark.slow
def test_sizes_are_padded_to_tiles() -> None:
    """Values and gradients of 20 rows, 48 inputs and 80 outputs, by the kernel for GPUs."""
    rng = np.random.default_rng(0)
    x, w, d_out = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in ((20, 48), (2, 48, 80), (20, 80)))
    sizes = jnp.asarray([7, 13])
    row = dataclasses.replace(BACKENDS["triton"], run=partial(triton.grouped_matmul, interpret=True))
    operation = Operation("grouped_matmul", {"triton": dataclasses.replace(row, platforms=("cpu",))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "OPERATION", operation)
        out, pull_back = jax.vjp(lambda x, w: package.grouped_matmul(x, w, sizes, backend="auto"), x, w)
    expected = numpy_grouped_matmul(*(np.asarray(array, np.float64) for array in (x, w, d_out)), [7, 13])
    for got, want in zip((out, *pull_back(d_out)), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-2, atol=1e-2 * np.abs(want).max())


def test_the_tpu_kernels_are_selected_on_a_tpu() -> None:
    large = LARGE | {"platform": "tpu", "outputs": 384}
    assert OPERATION.choose("auto", Call(**large)) == "megablox"
    with pytest.raises(UnsupportedError, match="in multiples of 128, not 192 and 384"):
        OPERATION.choose("megablox", Call(**{**large, "inputs": 192}))


def test_on_hopper_large_shapes_use_mosaic_and_others_do_not() -> None:
    large = LARGE | {"platform": "gpu", "capability": "9.0", "outputs": 256}
    assert OPERATION.choose("auto", Call(**large)) == "mosaic"
    for change, reason in (
        ({"capability": "8.0"}, "needs a GPU of compute capability 9.0, not 8.0"),
        ({"dtype": "float16"}, "takes bfloat16, not float16"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            OPERATION.choose("mosaic", Call(**{**large, **change}))
        assert OPERATION.choose("auto", Call(**{**large, **change})) == "triton"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[9, 0, 29, 10, 400], [1, 16, 3, 0, 5], [0, 0, 0, 0, 0], [0, 512, 0, 0, 0]])
def test_every_row_of_a_group_is_in_one_tile_of_each_column(sizes: list[int]) -> None:
    rows, columns, align = 64, 3, 8
    tiles, num_tiles = schedule(jnp.asarray(sizes), 512, rows=rows, columns=columns, align=align, band=2)
    ends = np.cumsum(sizes)
    counts = np.zeros((512, columns), int)
    assert int(num_tiles[0]) <= len(tiles)
    for group, row, first, end, column in np.asarray(tiles)[: int(num_tiles[0])]:
        assert row % align == 0 and (first, end) == (ends[group] - sizes[group], ends[group])
        counts[max(row, first) : min(row + rows, end), column] += 1
    assert (counts[: ends[-1]] == 1).all() and not counts[ends[-1] :].any()


@pytest.mark.slow
def test_the_hopper_kernels_are_lowered_without_a_gpu() -> None:
    """Including the wgmma layouts."""
    shapes = (((256, 256), jnp.bfloat16), ((3, 256, 256), jnp.bfloat16), ((3,), jnp.int32))
    x, w, sizes = (jax.ShapeDtypeStruct(*spec) for spec in shapes)

    def gradients(x: jax.Array, w: jax.Array, sizes: jax.Array, d_out: jax.Array) -> tuple:
        out, pull_back = jax.vjp(lambda x, w: mosaic.grouped_matmul(x, w, sizes), x, w)
        return out, *pull_back(d_out)

    traced = jax.jit(gradients).trace(x, w, sizes, x)
    assert [info.shape for info in traced.out_info] == [(256, 256), (256, 256), (3, 256, 256)]
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 3


@pytest.mark.slow
@pytest.mark.default_cases("sizes0")
@pytest.mark.parametrize("sizes", [[70, 0, 5, 90], [3, 130, 0, 59]])
def test_the_hopper_kernels_equal_numpy(sizes: list[int]) -> None:
    """Groups that share a block, fill several programs, or are empty; the first case has rows of no group.

    Tiles extend beyond the last column, and beyond the last row of a matrix.
    """
    rng = np.random.default_rng(0)
    x, w, d_out = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in ((192, 192), (4, 192, 320), (192, 320)))
    kernels = mosaic.Kernels(KernelParams(columns=128, stages=2, band=16, processors=4))

    def gradients(x: jax.Array, w: jax.Array, d_out: jax.Array, sizes: jax.Array) -> tuple:
        out, pull_back = jax.vjp(lambda x, w: grouped_matmul_vjp(kernels, x, w, sizes), x, w)
        return out, *pull_back(d_out)

    expected = numpy_grouped_matmul(*(np.asarray(array, np.float64) for array in (x, w, d_out)), sizes)
    for got, want in zip(run(gradients, x, w, d_out, jnp.asarray(sizes)), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-2, atol=1e-2 * np.abs(want).max())


@pytest.mark.slow
def test_the_hopper_kernel_of_two_matmuls_equals_numpy() -> None:
    """Outputs, the gradients of both matrices, and that of the rows, which one kernel sums over both."""
    rng = np.random.default_rng(0)
    shapes = ((192, 128), (4, 128, 192), (4, 128, 192), (192, 192), (192, 192))
    x, *arrays = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in shapes)
    w, d_out, sizes = tuple(arrays[:2]), tuple(arrays[2:]), [3, 130, 0, 59]
    kernels = mosaic.Kernels(KernelParams(columns=128, stages=2, band=16, processors=4))

    def gradients(x: jax.Array, w: tuple, sizes: jax.Array, d_out: tuple) -> tuple:
        out, pull_back = jax.vjp(lambda x, w: grouped_matmul_pair_vjp(kernels, x, w, sizes), x, w)
        return out, *pull_back(d_out)

    (out, d_x, d_w) = run(gradients, x, w, jnp.asarray(sizes), d_out)
    expected = [
        numpy_grouped_matmul(*(np.asarray(array, np.float64) for array in (x, *each)), sizes)
        for each in zip(w, d_out, strict=True)
    ]
    found = (*out, d_x, *d_w)
    summed = (*(each[0] for each in expected), expected[0][1] + expected[1][1], *(each[2] for each in expected))
    for got, want in zip(found, summed, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-2, atol=1e-2 * np.abs(want).max())


@pytest.mark.slow
def test_two_matmuls_are_those_of_each_matrix() -> None:
    """Values and gradients on this machine's backend."""
    rng = np.random.default_rng(0)
    x, w, other = (jnp.asarray(rng.normal(size=shape), "float32") for shape in ((10, 4), (3, 4, 6), (3, 4, 6)))
    sizes, towards = jnp.asarray([3, 0, 7]), jnp.asarray(rng.normal(size=(2, 10, 6)), "float32")

    def loss(matmuls: Callable[..., tuple], *arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack(matmuls(*arrays)) * towards)

    def each(x: jax.Array, *matrices: jax.Array) -> tuple:
        return tuple(package.grouped_matmul(x, w, sizes, backend="reference") for w in matrices)

    def pair(x: jax.Array, *matrices: jax.Array) -> tuple:
        return package.grouped_matmul_pair(x, *matrices, sizes, backend="auto")

    found, expected = (jax.value_and_grad(lambda *a, f=f: loss(f, *a), (0, 1, 2))(x, w, other) for f in (pair, each))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    with pytest.raises(ValueError, match="the matrices differ"):
        package.grouped_matmul_pair(x, w, other[:, :, :3], sizes, backend="auto")


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 4288])
def test_every_token_is_copied_to_its_rows(dim: int) -> None:
    """Rows of one piece and of several."""
    x = jax.random.normal(jax.random.key(0), (6, dim), "bfloat16")
    rows = jax.random.permutation(jax.random.key(1), 12).reshape(6, 2)
    expected = jnp.zeros((12, dim), "bfloat16").at[rows].set(x[:, None])
    np.testing.assert_array_equal(row_copies.copy_to_rows(x, rows, interpret=True), expected)
