"""QKV split with RoPE: the kernel in interpret mode against transformers' RoPE; its capability table."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxhydra.kernels.placement import Placement
from maxhydra.kernels.qkv_rope import OPERATION, Call, UnsupportedError, qkv_rope, triton
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
llama = import_optional("transformers.models.llama.modeling_llama", extra="parity")

B, T, N, K, H = 2, 16, 3, 1, 32


def by_transformers(heads: np.ndarray, angles: np.ndarray, cotangents: list[np.ndarray]) -> list[np.ndarray]:
    """Query, key, value, and the gradient of the projection."""
    projection = torch.tensor(heads, requires_grad=True)
    q, k, v = torch.split(projection.transpose(1, 2), (N, K, K), dim=1)
    twice = torch.tensor(np.concatenate([angles, angles], axis=-1))
    q, k = llama.apply_rotary_pos_emb(q, k, twice.cos(), twice.sin())
    parts = [part.transpose(1, 2) for part in (q, k, v)]
    sum(torch.sum(part * torch.tensor(d)) for part, d in zip(parts, cotangents, strict=True)).backward()
    return [*(part.detach().numpy() for part in parts), projection.grad.numpy()]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_kernel", [True, False])
def test_heads_and_their_gradient_equal_transformers(is_kernel: bool, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    heads = jnp.asarray(rng.normal(size=(B, T, N + 2 * K, H)), dtype)
    cotangents = [jnp.asarray(rng.normal(size=(B, T, count, H)), dtype) for count in (N, K, K)]
    angles = np.arange(B * T).reshape(B, T, 1) * np.linspace(0.01, 1, H // 2)
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)

    @jax.jit
    def run(heads: jax.Array) -> tuple:
        def split(heads: jax.Array) -> tuple[jax.Array, ...]:
            if not is_kernel:
                return qkv_rope(heads, cos, sin, num_heads=N, num_kv_heads=K, backend="xla")
            flat = (x.reshape(B * T, *x.shape[2:]) for x in (heads, cos, sin))
            tile = triton.Tile(tokens=8, warps=4)
            outputs = triton.qkv_rope(*flat, num_heads=N, num_kv_heads=K, tile=tile, interpret=True)
            return tuple(x.reshape(B, T, *x.shape[1:]) for x in outputs)

        out, pull_back = jax.vjp(split, heads)
        return *out, *pull_back(tuple(cotangents))

    wide = [np.asarray(x, np.float64) for x in (heads, *cotangents)]
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for got, expected in zip(run(heads), by_transformers(wide[0], angles, wide[1:]), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_the_kernel_serves_one_gpu_and_gives_the_reason_otherwise() -> None:
    defaults = {"platform": "gpu", "dtype": "bfloat16", "tokens": 4096, "head_dim": 128}
    assert OPERATION.choose("auto", Call(**defaults)) == "triton"
    for change, reason in (
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"splits": ("batch", "heads")}, "cannot be split over heads"),
        ({"tokens": 100}, "takes tokens in multiples of 16, not 100"),
        ({"head_dim": 96}, "takes heads of 64 or 128 or 256, not 96"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            OPERATION.choose("triton", Call(**{**defaults, **change}))
        assert OPERATION.choose("auto", Call(**{**defaults, **change})) == "xla"


@pytest.mark.exhaustive
def test_the_kernel_over_a_mesh_equals_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens split over batch and length, with the gradient of the projection."""
    run = partial(triton.qkv_rope, tile=triton.Tile(tokens=8, warps=4), interpret=True)
    changes = {"run": run, "platforms": ("cpu",), "token_multiple": 8, "head_dims": (H,)}
    monkeypatch.setitem(OPERATION.backends, "triton", dataclasses.replace(OPERATION.backends["triton"], **changes))
    mesh = jax.make_mesh((2, 2), ("fsdp", "sequence"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    heads = jnp.asarray(rng.normal(size=(B, T, N + 2 * K, H)), jnp.bfloat16)
    cos, sin = (jnp.asarray(rng.normal(size=(B, T, H // 2)), jnp.float32) for _ in range(2))

    def value_and_gradient(place: Placement) -> list[np.ndarray]:
        def split(heads: jax.Array) -> tuple[jax.Array, ...]:
            return qkv_rope(heads, cos, sin, num_heads=N, num_kv_heads=K, backend="triton", place=place)

        out, pull_back = jax.vjp(split, heads)
        return [np.asarray(x, np.float32) for x in (*out, *pull_back(out))]

    split = value_and_gradient(Placement("cpu", mesh, batch="fsdp", length="sequence"))
    for got, want in zip(split, value_and_gradient(Placement("cpu")), strict=True):
        np.testing.assert_array_equal(got, want)
