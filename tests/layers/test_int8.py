"""int8 weights against the same quantization in NumPy, and decoding with them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import Quantization, QuantizationKind
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.kernels.int8_weight_matmul import int8_weight_matmul, triton
from maxhydra.kernels.matmul import Layout
from maxhydra.layers import Context
from maxhydra.layers.quant.int8 import quantized
from maxhydra.model import ModelDef, build, map_leaves, store_weight
from maxhydra.sharding import Sharder
from maxhydra.train import plan_states

SINGLE = Sharder.single()


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(weight: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Quantize a weight to int8 with scales along an axis, and dequantize it."""
    scale = np.abs(weight).max(axis=axis, keepdims=True) / 127
    return np.round(weight / scale) * scale


def test_codes_equal_numpy_and_zero_columns_stay_zero() -> None:
    weight = draw(6, 5, 4, seed=0)
    weight[:, 2, 3] = 0
    parts = quantized(jnp.asarray(weight), (0,))
    assert parts.codes.dtype == jnp.int8 and parts.scales.shape == (5, 4)
    np.testing.assert_allclose(parts.codes * parts.scales, np.nan_to_num(rounded(weight, 0)), rtol=1e-6)
    assert np.abs(np.asarray(parts.codes)).max() == 127


@pytest.mark.slow
@pytest.mark.default_cases("16-512-2-bfloat16", "48-192-19-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [2, 19])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 192), (16, 512)])
def test_kernel_equals_numpy(rows: int, outputs: int, inputs: int, dtype: jnp.dtype) -> None:
    x = jnp.asarray(draw(rows, inputs, seed=1), dtype)
    parts = quantized(jnp.asarray(draw(outputs, inputs, seed=2)), (1,))
    found = triton.small_batch_matmul(x, parts.codes, parts.scales, jnp.dtype(jnp.float32), interpret=True)
    wide = np.asarray(x, np.float64) @ (np.float64(parts.codes) * np.float64(parts.scales)[:, None]).T
    np.testing.assert_allclose(found, wide, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", Layout)
def test_matmul_over_several_dimensions_equals_numpy(layout: Layout) -> None:
    x, weight = draw(2, 1, 4, 8, seed=0), draw(4, 8, 3, 5, seed=1)
    parts = quantized(jnp.asarray(weight), (0, 1))
    found = int8_weight_matmul(jnp.asarray(x), parts.codes, parts.scales, layout=layout, is_single_device=True)
    np.testing.assert_allclose(found, np.einsum("rtab,abwx->rtwx", x, rounded(weight, (0, 1))), rtol=1e-5, atol=1e-5)


def model(head: config.Head, targets: list[str], **changes: int) -> ModelDef:
    sizes = {"num_layers": 2, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    fields = {**sizes, "vocab_size": 50, "context_length": 64, "kinds": {"layer": config.Kind()}, "head": head}
    kind = QuantizationKind.int8_weights if targets else QuantizationKind.none
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    return build(config.Model(**{**fields, **changes}, dtypes=dtypes), None, Quantization(kind=kind, targets=targets))


def logits(model: ModelDef, params: dict) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 12)))
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    context = Context(positions=positions, segments=None, sharder=SINGLE, cache=None, dropout_key=None)
    run = jax.jit(lambda params: model.logits(params, model.hidden(params, tokens, context)[0], SINGLE))
    return np.asarray(run(params))


def rounded_tree(params: dict) -> dict:
    """Every matrix of a tree quantized by NumPy along its contracted dimensions."""
    sums = {"query": (1,), "key": (1,), "value": (1,), "out": (1, 2), "gate": (1,), "up": (1,), "down": (1,)}

    def one(path: tuple, leaf: jax.Array) -> np.ndarray:
        keys = [entry.key for entry in path]
        if keys[-1] == "table" or keys[0] == "head":
            return rounded(np.asarray(leaf), 1 if keys[-1] == "table" else 0)
        return rounded(np.asarray(leaf), sums[keys[-2]]) if keys[-2] in sums else np.asarray(leaf)

    return jax.tree_util.tree_map_with_path(one, params)


ALL = ["attention/", "mlp/", "^(embedding|head)$"]


@pytest.mark.slow
@pytest.mark.default_cases("Head.tied-gpu", "Head.separate-cpu")
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("head", config.Head)
def test_quantized_model_equals_dequantized_weights(head: config.Head, platform: str) -> None:
    """In the training layout, and in the decode layout of each platform."""
    packed = model(head, ALL)
    plain = packed.base.init(jax.random.key(0))
    expected = logits(packed.base, rounded_tree(plain))
    params = map_leaves(plain, partial(store_weight, packed))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), packed.shapes
    )
    np.testing.assert_allclose(logits(packed, params), expected, rtol=1e-4, atol=1e-4)
    arranged = choose_weight_layout(packed, SINGLE, platform)
    np.testing.assert_allclose(logits(arranged.model, arranged.use(arranged.keep(params))), expected, atol=1e-4)


@pytest.mark.slow
def test_targets_select_weights_and_formats_mix_within_a_layer() -> None:
    packed = model(config.Head.tied, ["attention/query", "mlp/up"])
    params = map_leaves(packed.base.init(jax.random.key(0)), partial(store_weight, packed))
    layer = params["pattern"]["0"]
    assert set(layer["attention"]["query"]["kernel"]) == {"codes", "scales"}
    assert isinstance(layer["attention"]["key"]["kernel"], jax.Array)
    arranged = choose_weight_layout(packed, SINGLE, "gpu")
    found = logits(arranged.model, arranged.use(arranged.keep(params)))
    np.testing.assert_allclose(found, logits(packed, params), atol=1e-4)


def test_tied_model_has_no_head_to_quantize() -> None:
    with pytest.raises(ConfigError, match=r"quantization\.targets.*no projection's name matches '\^head\$'"):
        _ = model(config.Head.tied, ["^head$"]).shapes
    with pytest.raises(ConfigError, match="no projection's name matches 'embedding'"):
        fp8 = dataclasses.replace(
            model(config.Head.tied, []), quantization=Quantization(kind=QuantizationKind.fp8, targets=["embedding"])
        )
        _ = fp8.shapes


def test_training_with_int8_weights_is_rejected() -> None:
    requested = compose(["quantization=int8_weights"]).config
    with pytest.raises(ConfigError, match=r"quantization\.kind.*is for inference only; it cannot be trained"):
        plan_states(requested, SINGLE)
