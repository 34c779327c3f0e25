"""The RMSNorm kernel in interpret mode against torch, values and gradients; its capability table."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxhydra.kernels.placement import Placement
from maxhydra.kernels.rms_norm import OPERATION, Call, UnsupportedError, rms_norm, triton
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")

EPS = 1e-5
DIMENSIONS = ("batch", "stream_length")
TILES = triton.Tiles(triton.Tile(2, 4), triton.Tile(4, 4))


def by_torch(x: np.ndarray, scale: np.ndarray, d_stream: np.ndarray, d_normed: np.ndarray) -> list[np.ndarray]:
    x_, scale_ = (torch.tensor(array, requires_grad=True) for array in (x, scale))
    normed = torch.nn.functional.rms_norm(x_, (x.shape[1],), scale_, EPS)
    (torch.sum(normed * torch.tensor(d_normed)) + torch.sum(x_ * torch.tensor(d_stream))).backward()
    return [normed.detach().numpy(), x_.grad.numpy(), scale_.grad.numpy()]


# A row in one piece, and in three.
@pytest.mark.slow
@pytest.mark.default_cases("float32-768", "bfloat16-256")
@pytest.mark.parametrize("dim", [256, 768])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_equals_torch(dim: int, dtype: jnp.dtype) -> None:
    """The gradients of the norm and of the residual stream are added; the scale is float32 for any dtype of rows."""
    rng = np.random.default_rng(dim)
    x, d_stream, d_normed = (jnp.asarray(3 * rng.normal(size=(8, dim)), dtype) for _ in range(3))
    scale = jnp.asarray(rng.normal(size=dim), jnp.float32)

    @jax.jit
    def run(x: jax.Array, scale: jax.Array) -> tuple:
        def normed(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            return triton.rms_norm(x, scale, eps=EPS, dtype=dtype, tiles=TILES, interpret=True)

        (residual, out), pull_back = jax.vjp(normed, x, scale)
        return residual, out, *pull_back((d_stream, d_normed))

    residual, *got = run(x, scale)
    np.testing.assert_array_equal(residual, x)
    expected = by_torch(*(np.asarray(array, np.float64) for array in (x, scale, d_stream, d_normed)))
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for actual, desired in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), desired, rtol=tolerance, atol=tolerance)


def test_without_a_gpu_xla_gives_the_same() -> None:
    x, scale = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32), jnp.linspace(0.5, 2, 16)
    residual, normed = rms_norm(x, scale, eps=EPS, dtype=jnp.float32, backend="auto")
    expected = torch.nn.functional.rms_norm(torch.tensor(np.asarray(x)), (16,), torch.tensor(np.asarray(scale)), EPS)
    np.testing.assert_array_equal(residual, x)
    np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=1e-6)


def test_the_kernel_serves_many_rows_on_one_gpu_and_gives_the_reason_otherwise() -> None:
    many = {"platform": "gpu", "dtype": "bfloat16", "rows": 4096, "dim": 3072}
    assert OPERATION.choose("auto", Call(**many)) == "triton"
    assert OPERATION.choose("auto", Call(**many, splits=("batch", "length"))) == "triton"
    for change, reason in (
        ({"platform": "tpu"}, "runs on gpu, not tpu"),
        ({"splits": ("heads",)}, "cannot be split over heads"),
        ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
        ({"rows": 64}, "takes 512 rows or more in multiples of 16, not 64"),
        ({"dim": 2880}, "takes rows in multiples of 256 up to 8192 numbers, not 2880"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            OPERATION.choose("triton", Call(**{**many, **change}))
        assert OPERATION.choose("auto", Call(**{**many, **change})) == "xla"


@pytest.mark.slow
def test_the_kernel_over_a_mesh_equals_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows split over batch and length; the gradient of the scale is a sum over both."""
    run = partial(triton.rms_norm, tiles=TILES, interpret=True)
    row = dataclasses.replace(OPERATION.backends["triton"], run=run, platforms=("cpu",), min_rows=8, row_multiple=8)
    monkeypatch.setitem(OPERATION.backends, "triton", row)
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "data"), axis_types=(AxisType.Auto,) * 3)
    place = Placement("cpu", mesh, batch="fsdp", stream_length="tensor")
    rng = np.random.default_rng(0)
    x, d_stream, d_normed = (jnp.asarray(rng.normal(size=(4, 8, 256)), jnp.bfloat16) for _ in range(3))
    scale = jnp.asarray(rng.normal(size=256), jnp.float32)

    def value_and_grads(place: Placement) -> list[jax.Array]:
        def normed(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            return rms_norm(x, scale, eps=EPS, dtype=jnp.bfloat16, backend="triton", place=place)

        out, pull_back = jax.vjp(normed, x, scale)
        return [np.asarray(array, np.float32) for array in (*out, *pull_back((d_stream, d_normed)))]

    for got, want in zip(value_and_grads(place), value_and_grads(Placement("cpu")), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


def test_xla_gathers_no_rows_that_are_split_over_batch_and_length() -> None:
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = Placement("cpu", mesh, batch="fsdp", stream_length="tensor")

    def gradients(x: jax.Array, scale: jax.Array, d_stream: jax.Array, d_normed: jax.Array) -> tuple:
        normed = partial(rms_norm, eps=EPS, dtype=jnp.float32, backend="xla", place=place)
        return jax.vjp(normed, x, scale)[1]((d_stream, d_normed))

    rows = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32, sharding=NamedSharding(mesh, place.spec(*DIMENSIONS, None)))
    scale = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    program = jax.jit(gradients).lower(rows, scale, rows, rows).compile()
    assert "all-gather" not in str(program.as_text())
    assert program.output_shardings[0].is_equivalent_to(rows.sharding, 3)
