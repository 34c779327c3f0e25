"""int4 weights against Qwix and NumPy, quantization-aware training, and rules that select formats."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import Quantization, QuantizationKind, QuantizationRule
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.layers import Context
from maxhydra.layers.quant.int4 import quantized
from maxhydra.model import ModelDef, build, map_leaves, store_weight
from maxhydra.train import plan_states
from tests.layers.test_int8 import SINGLE, logits
from tests.support.skips import import_optional

SIZES = {"num_layers": 2, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ENDS = QuantizationRule(kind=QuantizationKind.int8_weights, targets=["^(embedding|head)$"])
QAT_ENDS = QuantizationRule(kind=QuantizationKind.qat_int8, targets=["^(embedding|head)$"])


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def model(quantization: Quantization, kind: config.Kind | None = None, **changes: Any) -> ModelDef:
    fields = {**SIZES, "vocab_size": 50, "context_length": 64, "kinds": {"layer": kind or config.Kind()}, **changes}
    return build(config.Model(**fields, dtypes=config.Dtypes(compute=config.Dtype.float32)), None, quantization)


def four_bits(kind: QuantizationKind, ends: QuantizationRule, **changes: Any) -> Quantization:
    fields = {"kind": kind, "targets": ["attention/", "mlp/"], "group": 16, "overrides": {"ends": ends}}
    return Quantization(**{**fields, **changes})


def numpys(kernel: np.ndarray, group: int) -> np.ndarray:
    """Quantize and dequantize [inputs, outputs] in groups, whose largest magnitude maps to 7."""
    blocks = kernel.reshape(-1, group, kernel.shape[-1])
    scales = np.abs(blocks).max(1, keepdims=True) / 7
    return (np.round(blocks / scales) * scales).reshape(kernel.shape)


@pytest.mark.slow
def test_quantize_and_dequantize_equal_qwix() -> None:
    qwix = import_optional("qwix", extra="parity")
    kernel = draw(64, 24)
    parts = quantized(kernel, inputs=1, leading=0, groups=4)
    # Theirs goes half a step beyond the largest code, unless told otherwise.
    expected_kernel = qwix.quantize(
        kernel, qtype=jnp.int4, channelwise_axes=(1,), tiled_axes={0: 16}, calibration_method=f"absmax,{7.5 / 7}"
    )
    found = parts.kernel(jnp.dtype(jnp.float32), leading=0)
    np.testing.assert_allclose(found, qwix.dequantize(expected_kernel), rtol=1e-6)
    np.testing.assert_allclose(found, numpys(np.asarray(kernel), 16), rtol=1e-6)
    assert parts.nibbles.nbytes == kernel.size // 2 and parts.scales.shape == (4, 24)


@pytest.mark.slow
def test_inputs_are_flattened_and_leading_dimensions_kept() -> None:
    kernel = draw(3, 2, 4, 8, 5)
    parts = quantized(kernel, inputs=2, leading=2, groups=2)
    found = parts.kernel(jnp.dtype(jnp.float32), leading=2)
    expected = [numpys(one, 16) for one in np.asarray(kernel).reshape(6, 32, 5)]
    np.testing.assert_allclose(found.reshape(6, 32, 5), expected, rtol=1e-6)


def rounded_tree(params: Any) -> Any:
    """Every matrix of a tree quantized by NumPy: layers in groups of 16 inputs, embedding and head by rows."""
    inputs = {"query": 1, "key": 1, "value": 1, "out": 2, "gate": 1, "up": 1, "down": 1}

    def one(path: tuple, leaf: jax.Array) -> np.ndarray:
        keys, leaf = [entry.key for entry in path], np.asarray(leaf)
        if keys[-1] == "table" or keys[0] == "head":
            scale = np.abs(leaf).max(1 if keys[-1] == "table" else 0, keepdims=True) / 127
            return np.round(leaf / scale) * scale
        if len(keys) < 2 or keys[-2] not in inputs:
            return leaf
        lead = 2 if "experts" in keys else 1
        size = int(np.prod(leaf.shape[lead : lead + inputs[keys[-2]]]))
        flat = leaf.reshape(-1, size, int(np.prod(leaf.shape[lead + inputs[keys[-2]] :])))
        return np.stack([numpys(kernel, 16) for kernel in flat]).reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(one, params)


@pytest.mark.slow
def test_quantized_model_equals_dequantized_weights() -> None:
    """In the training layout, and in the decode layout of each platform."""
    packed = model(four_bits(QuantizationKind.int4_weights, ENDS), head=config.Head.separate)
    plain = packed.base.init(jax.random.key(0))
    expected = logits(packed.base, rounded_tree(plain))
    params = map_leaves(plain, partial(store_weight, packed))
    assert set(params["pattern"]["0"]["mlp"]["up"]["kernel"]) == {"nibbles", "scales"}
    np.testing.assert_allclose(logits(packed, params), expected, rtol=1e-4, atol=1e-4)
    for platform in ("cpu", "gpu"):
        arranged = choose_weight_layout(packed, SINGLE, platform)
        np.testing.assert_allclose(logits(arranged.model, arranged.use(arranged.keep(params))), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.default_cases("4")
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_are_quantized_too(bits: int) -> None:
    moe = config.Moe(experts=4, dim=32)
    layer_kind = config.Kind(feed_forward=config.FeedForward.moe, moe=moe)
    kind = QuantizationKind.int4_weights if bits == 4 else QuantizationKind.int8_weights
    targets = Quantization(kind=kind, targets=["experts/"], group=16 if bits == 4 else None)
    packed = model(targets, layer_kind)
    plain = packed.base.init(jax.random.key(0))
    experts = plain["pattern"]["0"]["mlp"]["experts"]
    if bits == 4:
        narrow = rounded_tree({"experts": experts})["experts"]
    else:
        scale = jax.tree.map(lambda kernel: np.abs(kernel).max(2, keepdims=True) / 127, experts)
        narrow = jax.tree.map(lambda kernel, scale: np.round(kernel / scale) * scale, experts, scale)
    place = {**plain["pattern"]["0"], "mlp": {**plain["pattern"]["0"]["mlp"], "experts": narrow}}
    expected = logits(packed.base, {**plain, "pattern": {"0": place}})
    params = map_leaves(plain, partial(store_weight, packed))
    np.testing.assert_allclose(logits(packed, params), expected, rtol=1e-4, atol=1e-4)
    found = sum(leaf.nbytes for leaf in jax.tree.leaves(params["pattern"]["0"]["mlp"]["experts"]))
    # With a scale in float32 for every 16 or 32 inputs.
    assert found * 8 == {4: 6, 8: 9}[bits] * sum(leaf.size for leaf in jax.tree.leaves(narrow))


QAT = {
    "int4": (four_bits(QuantizationKind.qat_int4, QAT_ENDS), four_bits(QuantizationKind.int4_weights, ENDS)),
    "int8": tuple(
        Quantization(kind=kind, targets=["attention/", "mlp/", "^(embedding|head)$"])
        for kind in (QuantizationKind.qat_int8, QuantizationKind.int8_weights)
    ),
}


@pytest.mark.slow
@pytest.mark.default_cases("int4")
@pytest.mark.parametrize("bits", QAT)
def test_decode_equals_the_forward_pass_of_training(bits: str) -> None:
    trained, packed = (model(quantization) for quantization in QAT[bits])
    params = trained.init(jax.random.key(0))
    expected = logits(trained, params)
    assert np.abs(expected - logits(model(Quantization()), params)).max() > 1e-3
    np.testing.assert_array_equal(logits(packed, map_leaves(params, partial(store_weight, packed))), expected)


@pytest.mark.exhaustive
def test_gradient_is_straight_through() -> None:
    """The gradient of the weights is that of an unquantized model at the dequantized weights."""
    trained = model(four_bits(QuantizationKind.qat_int4, QAT_ENDS))
    plain, params = model(Quantization()), trained.init(jax.random.key(0))
    tokens, positions = jnp.arange(12).reshape(1, 12), jnp.arange(12).reshape(1, 12)
    context = Context(positions=positions, segments=None, sharder=SINGLE, cache=None, dropout_key=None)

    def loss(model: ModelDef, params: Any) -> jax.Array:
        return jnp.sum(model.logits(params, model.hidden(params, tokens, context)[0], SINGLE) ** 2)

    found = jax.jit(jax.grad(partial(loss, trained)))(params)
    expected = jax.jit(jax.grad(partial(loss, plain)))(rounded_tree(params))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-3), found, expected)


def test_first_matching_rule_applies() -> None:
    others = "{down:{kind:int8_weights,targets:[mlp/down]},out:{kind:none,targets:[attention/out]}}"
    quantization = compose(["quantization=int4_weights", f"+quantization.overrides={others}"]).config.quantization
    layer = model(quantization, emb_dim=64, mlp_dim=64, num_heads=8).shapes["pattern"]["0"]
    assert set(layer["mlp"]["down"]["kernel"]) == {"codes", "scales"}
    assert set(layer["mlp"]["up"]["kernel"]) == {"nibbles", "scales"}
    assert not isinstance(layer["attention"]["out"]["kernel"], dict)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["quantization=int4_weights", "+quantization.overrides={a:{kind:fp8,targets:[mlp/]}}"], "one is for training"),
        (["quantization=fp8", "quantization.group=32"], "is not used by kind=fp8"),
        (["quantization=int8_weights", "quantization.history=4"], "is not used by kind=int8_weights"),
        (["quantization=fp8", "quantization.backward=compute"], "is not used by kind=fp8"),
        (["quantization=int4_weights", "quantization.group=5"], "is odd"),
        (["quantization=int8_weights", "quantization.activations=int8"], "is not used by kind=int8_weights"),
        (["+quantization.overrides={a:{kind:fp8,targets:[mlp/]}}"], "need a base rule"),
    ],
)
def test_unsupported_combinations_are_rejected(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        compose(overrides)


def test_frozen_weights_reject_quantization_aware_training() -> None:
    with pytest.raises(ConfigError, match=r"quantization\.kind=qat_int4: (?s:.*)fp8 or int8 with an adapter"):
        plan_states(compose(["quantization=qat_int4", "adapter=lora"]).config, SINGLE)


def test_group_size_error_names_the_projection() -> None:
    with pytest.raises(ConfigError, match=r"quantization\.group=40.*layer/attention/query has 32 inputs"):
        _ = model(four_bits(QuantizationKind.int4_weights, ENDS, group=40)).shapes
    with pytest.raises(
        ConfigError, match=r"quantization\.overrides\.ends\.targets.*no projection's name matches '\^hed\$'"
    ):
        wrong = QuantizationRule(kind=QuantizationKind.int8_weights, targets=["^hed$"])
        _ = model(four_bits(QuantizationKind.int4_weights, wrong)).shapes
