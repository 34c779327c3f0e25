"""FP8 matmuls against NumPy on the same values, rounded by the float8 types of ml_dtypes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import Quantization, QuantizationKind
from maxhydra.kernels.fp8_matmul import fp8_matmul, triton
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder


def quantize(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Round x to a float8 format, scaled by the power of two that maps its amax just within the range."""
    largest = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / largest))
    return (x / scale).astype(dtype).astype(np.float64) * scale


def sample(*shape: int, seed: int, size: float) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_a_matmul_and_its_gradients_equal_those_of_the_rounded_values(size: float) -> None:
    x, weight, d_out = (
        sample(6, 32, seed=0, size=size),
        sample(32, 16, seed=1, size=0.1),
        sample(6, 16, seed=2, size=1e-4),
    )
    out, pull_back = jax.vjp(partial(fp8_matmul, True), jnp.asarray(x), jnp.asarray(weight))
    d_x, d_weight = pull_back(jnp.asarray(d_out))

    narrow_x, narrow_weight = quantize(x, ml_dtypes.float8_e4m3fn), quantize(weight, ml_dtypes.float8_e4m3fn)
    narrow_d = quantize(d_out, ml_dtypes.float8_e5m2)
    for actual, expected in (
        (out, narrow_x @ narrow_weight),
        (d_x, narrow_d @ narrow_weight.T),
        (d_weight, narrow_x.T @ narrow_d),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    assert not np.array_equal(narrow_x, x)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_the_kernel_rounds_as_numpy_does(dtype: Any) -> None:
    x = sample(256, 128, seed=0, size=100.0)
    values, transposed = triton.quantize(jnp.asarray(x), jnp.float32(2), jnp.dtype(dtype), interpret=True)
    np.testing.assert_array_equal(values, (x / 2).astype(dtype))
    np.testing.assert_array_equal(transposed, (x / 2).astype(dtype).T)


@pytest.mark.slow
def test_zeros_give_zeros_and_non_finite_values_propagate() -> None:
    weight = jnp.ones((4, 3))
    np.testing.assert_array_equal(fp8_matmul(True, jnp.zeros((2, 4)), weight), 0)
    for bad in (jnp.nan, jnp.inf):
        assert not np.isfinite(fp8_matmul(True, jnp.ones((2, 4)).at[0, 0].set(bad), weight)).all()


def model(**changes: Any) -> Any:
    sizes = {"num_layers": 2, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    fields = {**sizes, "vocab_size": 50, "context_length": 64, "kinds": {"layer": config.Kind()}}
    quantization = Quantization(**{"kind": QuantizationKind.fp8, "targets": ["attention/", "mlp/"], **changes})
    return build(config.Model(**fields, dtypes=config.Dtypes(compute=config.Dtype.float32)), None, quantization)


def hidden(model: Any) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 12)))
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    context = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
    return np.asarray(model.hidden(model.init(jax.random.key(0)), tokens, context)[0])


@pytest.mark.slow
def test_targets_select_the_projections() -> None:
    plain = hidden(model(kind=QuantizationKind.none, targets=[]))
    by_target = {
        targets: np.linalg.norm(hidden(model(targets=list(targets))) - plain) / np.linalg.norm(plain)
        for targets in (("mlp/down",), ("attention/query",), ("attention/", "mlp/"))
    }
    assert all(0 < error < 0.2 for error in by_target.values()), by_target
    assert by_target[("mlp/down",)] < by_target[("attention/", "mlp/")]


def test_a_target_without_a_projection_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"quantization\.targets.*no projection's name matches 'mpl/'"):
        _ = model(targets=["mpl/"]).shapes
