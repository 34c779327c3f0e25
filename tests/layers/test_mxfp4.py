"""MXFP4 weights against the formulas of the OCP MX specification in NumPy, and decoding with them."""

import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.quantization import Quantization, QuantizationKind
from maxhydra.convert.hf import hf_source
from maxhydra.convert.load import load_weights
from maxhydra.convert.orbax_io import write_checkpoint
from maxhydra.convert.streaming import InMemoryArrays
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Request
from maxhydra.decode.weight_layout import choose_weight_layout, unstacked
from maxhydra.layers import Context
from maxhydra.layers.quant.int8 import unpack_nibbles
from maxhydra.layers.quant.mxfp4 import GROUP, Mxfp4Parts, quantized
from maxhydra.model import ModelDef, build, map_leaves, store_weight
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import plan_states
from tests.layers.test_int4 import model
from tests.layers.test_int8 import SINGLE, logits

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "gpt_oss"
FLOAT32 = jnp.dtype(jnp.float32)
EXPERTS = Quantization(kind=QuantizationKind.mxfp4_weights, targets=["experts/"])


def specified(kernel: np.ndarray) -> np.ndarray:
    """[inputs, outputs] quantized and dequantized by section 6.3 of the specification."""
    blocks = kernel.astype(np.float64).reshape(-1, GROUP, kernel.shape[-1])
    # The largest power of two that is at most the amax, divided by that of the element format, 4.
    _, exponents = np.frexp(np.abs(blocks).max(1, keepdims=True))
    scales = np.exp2(exponents - 1.0 - 2.0)
    # Conversion rounds to the nearest even code.
    elements = np.clip(blocks / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return (elements * scales).reshape(kernel.shape)


@jax.jit
def quantize(kernel: jax.Array) -> Mxfp4Parts:
    return quantized(kernel, inputs=1, leading=0)


def values(parts: Mxfp4Parts) -> np.ndarray:
    return np.asarray(parts.kernel(FLOAT32, leading=0))


@pytest.mark.slow
def test_rounding_equals_the_specification() -> None:
    """Values of any scale, ties between two codes, values above the largest code, and zeros of both signs."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((128, 24)) * np.repeat(2.0 ** rng.integers(-60, 60, (4, 24)), GROUP, axis=0)
    ties = np.tile([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7.9, -0.25, -0.75, -5, -2.5, 0, -0.0, 7], 8)
    kernel = np.concatenate([normal, ties[:, None]], axis=1).astype(np.float32)
    parts = quantize(jnp.asarray(kernel))
    np.testing.assert_array_equal(values(parts), specified(kernel))
    np.testing.assert_array_equal(np.signbit(values(parts)), np.signbit(kernel))
    assert parts.nibbles.shape == (64, 25) and parts.scales.shape == (4, 25) and parts.scales.dtype == jnp.uint8
    assert not np.any(values(quantize(jnp.zeros((32, 1)))))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_stored_code_and_scale_keeps_its_value(dtype: Any) -> None:
    """Groups of all codes up to each of the eight magnitudes, with every scale for which all values are normal numbers.

    Where the largest magnitude is 4 or 6, codes and scales are those that were stored.
    """
    scales, largest = (grid.reshape(1, -1) for grid in np.meshgrid(np.arange(2, 253), np.arange(8)))
    codes = np.arange(GROUP)[:, None] % 16
    codes = np.where(codes % 8 <= largest, codes, largest + 8).astype(np.uint8)
    scales = scales.astype(np.uint8)
    kernel = E2M1[codes] * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    parts = quantize(jnp.asarray(kernel, dtype))
    np.testing.assert_array_equal(values(parts), kernel)
    np.testing.assert_array_equal(parts.kernel(jnp.dtype(jnp.bfloat16), leading=0).astype(jnp.float32), kernel)
    is_large = largest[0] >= 6
    np.testing.assert_array_equal(unpack_nibbles(parts.nibbles, 0)[:, is_large], codes[:, is_large])
    np.testing.assert_array_equal(parts.scales[:, is_large], scales[:, is_large])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_group_that_is_not_finite_is_nan(wrong: float) -> None:
    kernel = np.ones((64, 2), np.float32)
    kernel[3, 1] = wrong
    found = values(quantize(jnp.asarray(kernel)))
    np.testing.assert_array_equal(found, np.where((np.arange(64) < 32)[:, None] & [False, True], np.nan, 1))


@pytest.mark.exhaustive
def test_inputs_are_flattened_after_the_leading_dimensions() -> None:
    kernel = np.random.default_rng(0).standard_normal((3, 2, 4, 16, 5)).astype(np.float32)
    parts = quantized(jnp.asarray(kernel), inputs=2, leading=2)
    expected = [specified(one) for one in kernel.reshape(6, 64, 5)]
    np.testing.assert_array_equal(parts.kernel(FLOAT32, leading=2).reshape(6, 64, 5), expected)


@cache
def mixture() -> tuple[ModelDef, Any, ModelDef, Any]:
    """A model with experts in MXFP4 and its weights, and the base model with the dequantized values."""
    kind = config.Kind(feed_forward=config.FeedForward.moe, moe=config.Moe(experts=4, top_k=2, dim=64))
    packed = model(EXPERTS, kind, emb_dim=64, vocab_size=264)
    plain = packed.base.init(jax.random.key(0))
    place = plain["pattern"]["0"]

    def rounded(stack: jax.Array) -> np.ndarray:
        kernels = np.asarray(stack).reshape(-1, *stack.shape[2:])
        return np.stack([specified(kernel) for kernel in kernels]).reshape(stack.shape).astype(np.float32)

    experts = jax.tree.map(rounded, place["mlp"]["experts"])
    dequantized = {**plain, "pattern": {"0": {**place, "mlp": {**place["mlp"], "experts": experts}}}}
    # A copy, because map_leaves empties its argument.
    params = map_leaves(jax.tree.map(jnp.asarray, plain), partial(store_weight, packed))
    return packed, params, packed.base, dequantized


@pytest.mark.slow
def test_quantized_model_equals_dequantized_weights() -> None:
    """In the training layout, and in the decode layout of each platform."""
    packed, params, plain, dequantized = mixture()
    expected = logits(plain, dequantized)
    np.testing.assert_allclose(logits(packed, params), expected, rtol=1e-5, atol=1e-5)
    for platform in ("cpu", "gpu"):
        arranged = choose_weight_layout(packed, SINGLE, platform)
        stored = arranged.keep(params)
        nibbles = stored["prefix"]["0"]["mlp"]["experts"]["up"]["kernel"]["nibbles"]
        assert nibbles.dtype == {"cpu": jnp.uint8, "gpu": jnp.uint16}[platform]
        np.testing.assert_allclose(logits(arranged.model, arranged.use(stored)), expected, atol=1e-4)
    experts = params["pattern"]["0"]["mlp"]["experts"]
    sizes = sum(leaf.size for leaf in jax.tree.leaves(dequantized["pattern"]["0"]["mlp"]["experts"]))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(experts)) * 8 == 4.25 * sizes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes", [{}, {"expert": 2}, {"tensor": 2}, {"fsdp": 2}], ids=["single", "expert", "tensor", "fsdp"]
)
def test_tokens_of_the_engine_equal_those_of_dequantized_weights(axes: dict[str, int]) -> None:
    packed, params, plain, dequantized = mixture()
    sizes = EngineConfig(max_batch=2, cache_tokens=128, page_size=8, prefill_chunk=16, deterministic=True)
    sharder = Sharder(build_mesh(Mesh(**axes), jax.devices()[: math.prod(axes.values())]), RULES)
    engine = Engine(
        packed, jax.device_put(params, sharder.tree(packed.axes)), ByteTokenizer(), sizes, sharder=sharder, eos=()
    )
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    prompt, count = (5, 77, 130, 9, 201), 6
    request = Request(prompt=prompt, max_tokens=count, stop=(), ignore_eos=True, **sampling)
    completion = engine.submit(request).result()
    engine.close()
    tokens = jnp.asarray([[*prompt, *completion.tokens]])
    scores = forward(plain, dequantized, tokens)[0]
    assert completion.tokens == tuple(np.argmax(scores, axis=-1)[len(prompt) - 1 : -1].tolist())


def forward(model: ModelDef, params: Any, tokens_BT: jax.Array) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    context = Context(positions=positions, segments=None, sharder=SINGLE, cache=None, dropout_key=None)
    return np.asarray(model.logits(params, model.hidden(params, tokens_BT, context)[0], SINGLE))


@pytest.mark.slow
def test_a_checkpoint_in_mxfp4_has_the_same_codes(tmp_path: Path) -> None:
    packed, params, plain, _ = mixture()
    arrays = InMemoryArrays(plain.init(jax.random.key(0)))
    write_checkpoint(tmp_path, packed, arrays, dtype=FLOAT32)
    found = load_weights(str(tmp_path), packed, shardings=None, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    with pytest.raises(ConfigError, match=r"is quantized to mxfp4_weights"):
        load_weights(str(tmp_path), plain, shardings=None, dtype=jnp.float32)


@pytest.mark.slow
def test_a_folder_in_mxfp4_keeps_its_values(tmp_path: Path) -> None:
    """A gpt-oss model whose random experts are stored as blocks and scales."""
    settings = json.loads((GOLDEN / "config.json").read_text())
    settings |= {"intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rng, tensors, stored = np.random.default_rng(0), load_file(GOLDEN / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        if name.endswith("_bias"):
            outputs = 64 if "gate_up" in name else 32
            tensors[name] = rng.normal(size=(4, outputs)).astype(np.float32)
            continue
        E, outputs = len(tensors.pop(name)), 64 if "gate_up" in name else 32
        blocks = rng.integers(0, 256, (E, outputs, 1, 16)).astype(np.uint8)
        scales = rng.integers(110, 130, (E, outputs, 1)).astype(np.uint8)
        # One block whose largest magnitude is 1.
        blocks[0, 0] &= 0x22
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(E, outputs, 32)
        factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        stored[name] = np.swapaxes(E2M1[codes] * factors, 1, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(hf_source("model", str(tmp_path), tmp_path).model, quantization=EXPERTS)
    params = load_weights(str(tmp_path), model, shardings=None, dtype=jnp.bfloat16)
    for index, (_, layer, position) in enumerate(unstacked(model, params)):
        experts = layer["mlp"]["experts"]
        both, down = (stored[f"model.layers.{index}.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
        for name, expected in (("gate", both[..., ::2]), ("up", both[..., 1::2]), ("down", down)):
            parts = experts[name]["kernel"]
            parts = Mxfp4Parts(*(array if position is None else array[position] for array in parts.values()))
            np.testing.assert_array_equal(parts.kernel(FLOAT32, leading=1), expected)


@pytest.mark.slow
def test_unsupported_uses_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"mxfp4_weights(?s:.*)is for inference only"):
        plan_states(compose(["quantization=mxfp4_weights", "model=qwen3-30b-a3b"]).config, SINGLE)
    with pytest.raises(ConfigError, match=r"group(?s:.*)is not used by kind=mxfp4_weights"):
        compose(["quantization=mxfp4_weights", "quantization.group=64"])
    with pytest.raises(ConfigError, match=r"layer/mlp/down has 48 inputs(?s:.*)int4_weights"):
        _ = model(Quantization(kind=QuantizationKind.mxfp4_weights, targets=["mlp/"])).shapes
    with pytest.raises(ConfigError, match=r"no projection's name matches '\^head\$'"):
        _ = model(Quantization(kind=QuantizationKind.mxfp4_weights, targets=["^head$"])).shapes
