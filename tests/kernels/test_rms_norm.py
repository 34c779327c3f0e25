"""RMSNorm's kernel in interpret mode against torch, values and gradients, and what the table says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.kernels.rms_norm import Call, UnsupportedError, choose, rms_norm, triton
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")

EPS = 1e-5
TILES = triton.Tiles(triton.Tile(2, 4), triton.Tile(4, 4))


def by_torch(x: np.ndarray, scale: np.ndarray, d_stream: np.ndarray, d_normed: np.ndarray) -> list[np.ndarray]:
    x_, scale_ = (torch.tensor(array, requires_grad=True) for array in (x, scale))
    normed = torch.nn.functional.rms_norm(x_, (x.shape[1],), scale_, EPS)
    (torch.sum(normed * torch.tensor(d_normed)) + torch.sum(x_ * torch.tensor(d_stream))).backward()
    return [normed.detach().numpy(), x_.grad.numpy(), scale_.grad.numpy()]


# A row in one piece, and in three.
@pytest.mark.parametrize("dim", [256, 768])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_is_torchs(dim: int, dtype: jnp.dtype) -> None:
    """The gradients of the norm and of the stream beside it meet; a scale in float32 whatever the rows are."""
    rng = np.random.default_rng(dim)
    x, d_stream, d_normed = (jnp.asarray(3 * rng.normal(size=(8, dim)), dtype) for _ in range(3))
    scale = jnp.asarray(rng.normal(size=dim), jnp.float32)

    @jax.jit
    def run(x: jax.Array, scale: jax.Array) -> tuple:
        def normed(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            return triton.rms_norm(x, scale, eps=EPS, dtype=dtype, tiles=TILES, interpret=True)

        (stream, out), pull_back = jax.vjp(normed, x, scale)
        return stream, out, *pull_back((d_stream, d_normed))

    stream, *got = run(x, scale)
    np.testing.assert_array_equal(stream, x)
    wanted = by_torch(*(np.asarray(array, np.float64) for array in (x, scale, d_stream, d_normed)))
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=tolerance, atol=tolerance)


def test_without_a_gpu_it_is_the_same_by_xla() -> None:
    x, scale = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32), jnp.linspace(0.5, 2, 16)
    stream, normed = rms_norm(x, scale, eps=EPS, dtype=jnp.float32, backend="auto")
    wanted = torch.nn.functional.rms_norm(torch.tensor(np.asarray(x)), (16,), torch.tensor(np.asarray(scale)), EPS)
    np.testing.assert_array_equal(stream, x)
    np.testing.assert_allclose(normed, wanted, rtol=1e-5, atol=1e-6)


def test_the_kernel_serves_many_rows_on_one_gpu_and_says_why_not_otherwise() -> None:
    many = {"platform": "gpu", "devices": 1, "dtype": "bfloat16", "rows": 4096, "dim": 3072}
    assert choose("auto", Call(**many)) == "triton"
    for change, reason in (
        ({"platform": "tpu"}, "runs on gpu, not tpu"),
        ({"devices": 8}, "runs on 1 device, not 8"),
        ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
        ({"rows": 64}, "takes 512 rows or more in multiples of 16, not 64"),
        ({"dim": 2880}, "takes rows in multiples of 256 up to 8192 numbers, not 2880"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            choose("triton", Call(**{**many, **change}))
        assert choose("auto", Call(**{**many, **change})) == "xla"
