"""8-bit Adam against a NumPy transcription of the paper's quantization, and against float32 moments in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.optim.adam8 import SIGNED, UNSIGNED, Quantized, dequantize, quantize, scale_by_adam8
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train.state import plan_states

AXES = {"layer/kernel": ("layers", "embed", "mlp"), "norm/scale": ("norm",), "head/kernel": ("embed", "vocab")}
SHAPES = {"layer/kernel": (2, 3, 512), "norm/scale": (512,), "head/kernel": (3, 512)}
B1, B2, EPS, BLOCK = 0.9, 0.95, 1e-8, 256


def nested(flat: dict) -> dict:
    return {path.split("/")[0]: {path.split("/")[1]: value} for path, value in flat.items()}


def transcribed_values(is_signed: bool) -> list[float]:
    """bitsandbytes' create_dynamic_map for 8 bits, number by number."""
    data = []
    for i in range(7):
        items = 2**i if is_signed else 2 ** (i + 1)
        for j in range(items):
            mean = 0.1 + 0.9 * (j + 0.5) / items
            data += [10.0 ** (i - 6) * mean] + ([-(10.0 ** (i - 6)) * mean] if is_signed else [])
    return sorted([*data, 0.0, 1.0])


def rounded(x: np.ndarray, is_signed: bool) -> np.ndarray:
    """Each number replaced by the nearest one of its block's scaled map."""
    values, out = np.array(transcribed_values(is_signed)), np.zeros_like(x).reshape(-1, BLOCK)
    for row, block in zip(out, x.reshape(-1, BLOCK), strict=True):
        scale = np.abs(block).max()
        for index, number in enumerate(block):
            row[index] = values[np.abs(values - number / scale).argmin()] * scale
    return out.reshape(x.shape)


def test_values_are_those_of_the_paper():
    for values, is_signed in ((SIGNED, True), (UNSIGNED, False)):
        assert len(values) == len(set(values)) == 256
        np.testing.assert_allclose(values, transcribed_values(is_signed), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("values", "is_signed"), [(SIGNED, True), (UNSIGNED, False)], ids=["signed", "unsigned"])
def test_quantization_rounds_to_the_nearest_value(values, is_signed):
    x = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32) ** 3
    x = x if is_signed else np.abs(x)
    found = dequantize(quantize(jnp.asarray(x), values, BLOCK), values)
    np.testing.assert_allclose(found, rounded(x.astype(np.float64), is_signed), rtol=1e-5, atol=1e-9)
    zeros = quantize(jnp.zeros((1, BLOCK)), values, BLOCK)
    assert not np.any(dequantize(zeros, values))


@pytest.mark.slow
def test_three_updates_equal_a_transcription():
    random = np.random.default_rng(1)
    transform = scale_by_adam8(AXES, b1=B1, b2=B2, eps=EPS)
    state = transform.init(nested({path: jnp.zeros(shape) for path, shape in SHAPES.items()}))
    assert isinstance(state.mu["layer"]["kernel"], Quantized) and state.mu["layer"]["kernel"].codes.dtype == jnp.uint8
    assert state.mu["norm"]["scale"].dtype == state.nu["head"]["kernel"].dtype == jnp.float32
    moments = {path: (np.zeros(shape), np.zeros(shape)) for path, shape in SHAPES.items()}
    for step in range(1, 4):
        grads = {
            path: random.normal(size=shape) * 10.0 ** random.integers(-4, 1, shape) for path, shape in SHAPES.items()
        }
        updates, state = transform.update(nested(jax.tree.map(jnp.float32, grads)), state)
        for path, grad in grads.items():
            mean = B1 * moments[path][0] + (1 - B1) * grad
            square = B2 * moments[path][1] + (1 - B2) * grad**2
            expected = mean / (1 - B1**step) / (np.sqrt(square / (1 - B2**step)) + EPS)
            layer, name = path.split("/")
            found = np.asarray(updates[layer][name])
            # A number in the middle of two values may round to the other one in float32.
            assert np.mean(~np.isclose(found, expected, rtol=1e-4, atol=1e-6)) < 1e-3
            is_quantized = path == "layer/kernel"
            moments[path] = (rounded(mean, True), rounded(square, False)) if is_quantized else (mean, square)


@pytest.mark.slow
def test_moments_take_two_bytes_per_weight_and_keep_the_sharding_of_their_parameters():
    overrides = ["model=llama3-tiny", "model.head_dim=32", "model.emb_dim=512", "optimizer.moments=dynamic8"]
    config = compose([*overrides, "mesh.fsdp=4", "mesh.tensor=2"]).config
    states = plan_states(config, Sharder.from_config(config.mesh, build_mesh(config.mesh, jax.devices()[:8])))
    kernel = states.model.shapes["pattern"]["0"]["mlp"]["down"]["kernel"]
    adam = states.abstract().opt_state.inner.inner_states["trained"].inner_state["scale"]
    mu = adam.mu["pattern"]["0"]["mlp"]["down"]["kernel"]
    assert mu.codes.shape == kernel.shape and mu.codes.dtype == jnp.uint8
    assert mu.scales.shape == (*kernel.shape[:-1], kernel.shape[-1] // BLOCK)
    assert mu.codes.sharding.spec == states.abstract().params["pattern"]["0"]["mlp"]["down"]["kernel"].sharding.spec
    # Two blocks are not split over four devices.
    assert mu.scales.sharding.spec == jax.sharding.PartitionSpec(None, "tensor", None)


def test_first_moment_dtype_is_rejected_next_to_quantized_moments():
    with pytest.raises(ConfigError, match=r"optimizer\.mu_dtype"):
        compose(["optimizer.moments=dynamic8", "optimizer.mu_dtype=bfloat16"])
    with pytest.raises(ConfigError, match=r"optimizer\.moments"):
        compose(["optimizer=lion", "optimizer.moments=dynamic8"])
