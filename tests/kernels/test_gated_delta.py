"""The gated delta rule: the chunked form equals the recurrence, and both equal the paper's formula in NumPy."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxhydra.kernels.gated_delta import (
    OPERATION,
    Call,
    UnsupportedError,
    chunked,
    gated_delta,
    pallas_tpu,
    spec,
    triton,
)
from maxhydra.kernels.placement import Placement

B, M, N, K, V = 2, 2, 4, 6, 5


def inputs(length: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(length)
    q, k = rng.normal(size=(2, B, length, M, K))
    arrays = {
        "query_BTMK": q,
        "key_BTMK": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "value_BTNV": rng.normal(size=(B, length, N, V)),
        "log_decay_BTN": -rng.exponential(0.3, size=(B, length, N)),
        "rate_BTN": rng.uniform(size=(B, length, N)),
        "state_BNKV": rng.normal(size=(B, N, K, V)),
    }
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def numpy_recurrence(inputs: dict[str, jax.Array], segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of the paper in NumPy, one row and one head at a time, skipping padding."""
    wide = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    out, last = np.zeros((B, segments.shape[1], N, V)), wide["state_BNKV"].copy()
    for row in range(B):
        for head in range(N):
            state, segment = last[row, head], None
            for token in np.flatnonzero(segments[row]):
                if segment is not None and segments[row, token] != segment:
                    state = np.zeros((K, V))
                segment = segments[row, token]
                q, k = (wide[name][row, token, head // (N // M)] for name in ("query_BTMK", "key_BTMK"))
                state = np.exp(wide["log_decay_BTN"][row, token, head]) * state
                change = wide["rate_BTN"][row, token, head] * (wide["value_BTNV"][row, token, head] - state.T @ k)
                state = state + np.outer(k, change)
                out[row, token, head] = state.T @ q
            last[row, head] = state
    return out, last


@partial(jax.jit, static_argnames="backend")
def run(arrays: dict[str, jax.Array], segments: np.ndarray, backend: str) -> tuple[jax.Array, jax.Array]:
    return gated_delta(**arrays, segments_BT=segments, backend=backend)


def packed(length: int) -> np.ndarray:
    """A row of three segments with padding between and after them, and a row that is padded on the left."""
    first = np.repeat([1, 2, 0, 3, 0], [length // 2, length // 8, 3, length - length // 2 - length // 8 - 5, 2])
    return np.stack([first, np.where(np.arange(length) < length // 3, 0, 1)])


@pytest.mark.parametrize(
    "backend",
    [pytest.param("reference", marks=pytest.mark.exhaustive), pytest.param("chunked", marks=pytest.mark.slow)],
)
def test_states_pass_between_devices_that_share_a_sequence(backend):
    """Values and gradients over four parts of the sequence, with segments that begin within and between them."""
    arrays, segments = inputs(48), packed(48)
    axes = ("rows", "tokens", "heads")
    mesh = jax.make_mesh((1, 4, 2), axes, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:8])
    place = Placement("cpu", mesh, batch="rows", kv_heads="heads", length="tokens")

    def total(arrays, place):
        out, state = gated_delta(**arrays, segments_BT=segments, backend=backend, place=place)
        return jnp.sum(jnp.sin(out) * (segments != 0)[:, :, None, None]) + jnp.sum(jnp.cos(state)), (out, state)

    differentiate = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    found, expected = differentiate(arrays, place), differentiate(arrays, None)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "length"), [("reference", 40), ("chunked", 150)])
def test_values_and_the_last_state_equal_the_paper(backend, length):
    arrays, segments = inputs(length), packed(length)
    out, state = run(arrays, segments, backend)
    expected_out, expected_state = numpy_recurrence(arrays, segments)
    np.testing.assert_allclose(np.where((segments != 0)[:, :, None, None], out, 0), expected_out, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


@pytest.mark.slow
@pytest.mark.default_cases("packed")
@pytest.mark.parametrize("segments", [None, packed(150)], ids=["whole", "packed"])
def test_chunked_gradients_equal_the_recurrence(segments):
    arrays = inputs(150)
    is_token = np.ones((B, 150)) if segments is None else segments != 0

    @jax.jit
    def gradients(arrays):
        def total(arrays, backend):
            out, state = gated_delta(**arrays, segments_BT=segments, backend=backend)
            return jnp.sum(jnp.sin(out) * is_token[:, :, None, None]) + jnp.sum(jnp.cos(state))

        return [jax.grad(total)(arrays, backend) for backend in ("chunked", "reference")]

    chunked, recurrent = gradients(arrays)
    for name, expected in recurrent.items():
        np.testing.assert_allclose(chunked[name], expected, atol=2e-5, rtol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("correlation", "decay", "rate"), [(0.0, 0.1, 0.5), (0.5, 0.01, 0.9), (1.0, 0.0, 1.0), (0.9, 0.0, 1.9)]
)
def test_the_inverse_of_a_chunk_equals_a_solve_in_float64(correlation, decay, rate):
    """Also for nearly equal keys, where powers of the matrix overflow; with the derivative of the inverse."""
    rng = np.random.default_rng(0)
    keys = correlation * rng.normal(size=(3, 1, 32)) + (1 - correlation) * rng.normal(size=(3, 64, 32))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    age = np.arange(64)[:, None] - np.arange(64)[None]
    lower = np.tril(rate * keys @ keys.swapaxes(-1, -2) * np.exp(-decay * np.maximum(age, 0)), -1).astype(np.float32)
    change = np.tril(rng.normal(size=lower.shape), -1).astype(np.float32)
    got, got_change = jax.jvp(chunked.unit_triangular_inverse, (lower,), (change,))
    expected = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    expected_change = -expected @ change @ expected
    np.testing.assert_allclose(got_change, expected_change, atol=1e-5 * np.abs(expected_change).max())


@pytest.mark.exhaustive
def test_chunked_gradients_over_batch_and_length_equal_one_device():
    """The program ends on 8 simulated devices, which triangular solves of the CPU backend did not."""
    mesh = jax.make_mesh((4, 2), ("rows", "length"), axis_types=(AxisType.Auto,) * 2)
    tokens = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows", "length"))
    arrays = {name: jnp.tile(array, (2,) + (1,) * (array.ndim - 1)) for name, array in inputs(64).items()}
    state = arrays.pop("state_BNKV")

    @jax.jit
    def gradients(arrays):
        def total(arrays):
            return jnp.sum(jnp.sin(gated_delta(**arrays, state_BNKV=state, segments_BT=None, backend="chunked")[0]))

        return jax.grad(total)(arrays)

    expected = gradients(arrays)
    got = gradients(jax.device_put(arrays, tokens))
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_strong_decay_over_a_chunk_stays_finite():
    """Ten nats per token: cumulative decays, or their inverses, would leave the range of float32 within a chunk."""
    arrays = inputs(70)
    arrays["log_decay_BTN"] = arrays["log_decay_BTN"] - 10

    @partial(jax.grad, has_aux=True)
    def gradient(arrays):
        out, state = gated_delta(**arrays, segments_BT=None, backend="chunked")
        return jnp.sum(out**2), (out, state)

    gradients, (out, state) = jax.jit(gradient)(arrays)
    assert all(bool(jnp.all(jnp.isfinite(array))) for array in gradients.values())
    expected_out, expected_state = numpy_recurrence(arrays, np.ones((B, 70), int))
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, atol=1e-5)


KERNELS = {
    "pallas_tpu": (partial(pallas_tpu.gated_delta, interpret=True), 1e-5),
    "float32": (
        partial(triton.gated_delta, params=dataclasses.replace(triton.PARAMS["float32"], interpret=True)),
        1e-5,
    ),
    "bfloat16": (
        partial(triton.gated_delta, params=dataclasses.replace(triton.PARAMS["bfloat16"], interpret=True)),
        1.5e-2,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "tolerance"), KERNELS.values(), ids=KERNELS)
def test_kernels_equal_the_chunked_form_over_a_mesh(kernel, tolerance):
    """Rows sharded over two devices, key heads over two; values, the last state and all gradients."""
    rng, T = np.random.default_rng(0), 70
    heads = {"query_BTMK": (M, K), "key_BTMK": (M, K), "value_BTMGV": (M, 2, V), "rate_BTMG": (M, 2)}
    arrays = {name: rng.normal(size=(B, T, *shape)) / 4 for name, shape in heads.items()}
    arrays |= {"log_decay_BTMG": -rng.exponential(size=(B, T, M, 2)), "state_BMGKV": rng.normal(size=(B, M, 2, K, V))}
    given = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    place = Placement("tpu", mesh, batch="rows", kv_heads="heads")
    heads, state = place.spec("batch", None, "kv_heads"), place.spec("batch", "kv_heads")
    specs = spec.Inputs(heads, heads, heads, heads, heads, state, place.spec("batch"))
    kernel = place.shard_map(kernel, (specs,), (heads, state))

    @partial(jax.jit, static_argnums=1)
    def value_and_grads(given, run):
        def total(given):
            out, state = run(spec.masked(spec.Inputs(**given, starts_BT=None), jnp.asarray(packed(T))))
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state)), (out, state)

        return jax.value_and_grad(total, has_aux=True)(given)

    expected = jax.tree.leaves(value_and_grads(given, chunked.gated_delta))
    for got, want in zip(jax.tree.leaves(value_and_grads(given, kernel)), expected, strict=True):
        assert jnp.linalg.norm(got - want) < tolerance * jnp.linalg.norm(want)


def call(**changes) -> Call:
    defaults = {
        "platform": "gpu",
        "dtype": "bfloat16",
        "length": 64,
        "head_dims": (128, 128),
        "states": 1,
    }
    return Call(**{**defaults, "is_auto": False, **changes})


def test_auto_selects_the_fastest_and_an_unsupported_backend_is_an_error():
    fastest = {"cpu": "chunked", "gpu": "triton", "tpu": "pallas_tpu"}
    for platform, backend in fastest.items():
        assert OPERATION.choose("auto", call(is_auto=True, platform=platform)) == backend
        assert OPERATION.choose("auto", call(is_auto=True, platform=platform, length=1)) == "reference"
        assert OPERATION.choose("reference", call(platform=platform)) == "reference"
    assert OPERATION.choose("auto", call(is_auto=True, dtype="float32")) == "chunked"
    assert OPERATION.choose("triton", call(dtype="float32")) == "triton"
    with pytest.raises(UnsupportedError, match="runs on tpu, not cpu"):
        OPERATION.choose("pallas_tpu", call(platform="cpu"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "runs on gpu, not cpu"),
        ({"dtype": "float16"}, "takes bfloat16 or float32, not float16"),
        ({"head_dims": (128, 64)}, "takes keys and values of 128, not 128 or 64"),
        ({"states": 2**31}, "up to 2147483647 elements, not 2147483648"),
    ],
)
def test_the_gpu_kernel_gives_the_reason_for_unsupported_calls(change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        OPERATION.choose("triton", call(**change))
    assert OPERATION.choose("auto", call(is_auto=True, **change)) == "chunked"
