"""NF4 weights against NumPy and SciPy, and QLoRA adapters over them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.quantization import AdapterKind
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Request
from maxhydra.layers.quant.nf4 import BLOCK, LEVELS, quantized
from maxhydra.model import build, map_leaves, merge_adapter, merge_trees, split_trainable, store_weight
from maxhydra.sharding import Sharder, build_mesh
from tests.model.test_lora import TOKENS, added, context, lora, model_config, noisy

SIZES = {"emb_dim": 64, "mlp_dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def qlora(**changes: Any) -> Any:
    return lora(kind=AdapterKind.qlora, **changes)


@pytest.mark.slow
def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Two halves that meet at zero, from the outermost quantile of a uniform grid of sixteen."""
    from scipy.stats import norm

    end = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    positive = norm.ppf(np.linspace(end, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(end, 0.5, 8)[:-1])
    expected = np.sort([*positive, 0, *negative])
    np.testing.assert_allclose(sorted(LEVELS), expected / np.abs(expected).max(), atol=1e-6)
    assert len(LEVELS) == 16 and 0.0 in LEVELS and LEVELS[0] == -1 and LEVELS[-1] == 1


@pytest.mark.slow
@pytest.mark.default_cases("shape1")
@pytest.mark.parametrize("shape", [(128, 5), (192, 3, 4), (64, 300)])
def test_quantize_and_dequantize_equal_numpy(shape: tuple[int, ...]) -> None:
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32) * 0.02
    kernel[:BLOCK, 0] = 0
    blocks = kernel.reshape(-1, BLOCK, *shape[1:])
    scales = np.abs(blocks).max(1, keepdims=True)
    levels = np.array(LEVELS, np.float32)
    nearest = np.abs(blocks[..., None] / np.where(scales > 0, scales, 1)[..., None] - levels).argmin(-1)
    parts = quantized(jnp.asarray(kernel))
    codes = np.stack([parts.codes & 15, parts.codes >> 4], axis=1).reshape(blocks.shape)
    np.testing.assert_array_equal(codes, nearest)
    # Scales as 8-bit floats: within 1/16 of their distance from the mean of their group.
    mean = scales.mean(axis=tuple(range(1, scales.ndim)), keepdims=True)
    back = np.asarray(parts.kernel(jnp.float32)).reshape(blocks.shape)
    off = np.abs(back - levels[nearest] * scales)
    assert (off <= np.abs(scales - mean) / 16 + 1e-3 * mean).all()
    bits = 8 * sum(part.nbytes for part in vars(parts).values()) / kernel.size
    assert bits == 4 + 8 / BLOCK + 64 / (BLOCK * np.prod(shape[1:]))


@pytest.mark.exhaustive
def test_outputs_and_adapter_gradients_equal_those_of_dequantized_weights() -> None:
    config = model_config(**SIZES)
    plain, packed = build(config, lora()), build(config, qlora())
    base = jax.jit(plain.base.init)(jax.random.key(0))
    frozen = jax.jit(lambda base: map_leaves(base, lambda keys, weight: store_weight(packed, keys, weight)))(base)
    assert jax.tree.map(jnp.shape, frozen) == jax.tree.map(lambda leaf: leaf.shape, split_trainable(packed.shapes)[1])
    trained = split_trainable(noisy(jax.jit(plain.init)(jax.random.key(0))))[0]
    zero = jax.tree.map(jnp.zeros_like, trained)

    merged = jax.jit(lambda trained: merge_adapter(packed, merge_trees(trained, frozen), dtype=np.dtype(np.float32)))
    unpacked = merged(zero)
    difference = unpacked["pattern"]["0"]["mlp"]["up"]["kernel"] - base["pattern"]["0"]["mlp"]["up"]["kernel"]
    assert 0.01 < np.std(difference) / np.std(base["pattern"]["0"]["mlp"]["up"]["kernel"]) < 0.15

    def total(model: Any, frozen: Any) -> Any:
        def of(trained: Any) -> jax.Array:
            hidden, _ = model.hidden(merge_trees(trained, frozen), TOKENS, context(2, 7))
            return jnp.sum(jnp.sin(hidden))

        return jax.jit(jax.value_and_grad(of))(trained)

    found, expected = total(packed, frozen), total(plain, unpacked)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)
    answers = merged(trained)

    def hidden(model: Any, params: Any) -> jax.Array:
        return jax.jit(lambda params: model.hidden(params, TOKENS, context(2, 7))[0])(params)

    np.testing.assert_allclose(hidden(packed.base, answers), hidden(packed, merge_trees(trained, frozen)), atol=1e-5)
    by_hand = added(merge_trees(trained, unpacked), 2.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), answers, by_hand)


@pytest.mark.slow
def test_residuals_hold_no_dequantized_weights() -> None:
    """No residual of the forward pass has the size of a full-precision kernel."""
    config = dataclasses.replace(model_config(**SIZES), num_layers=4)
    model = build(config, qlora(targets=["attention/value"]))
    trained, frozen = split_trainable(jax.eval_shape(model.init, jax.random.key(0)))

    def loss(trained: Any, frozen: Any) -> jax.Array:
        return jnp.sum(model.hidden(merge_trees(trained, frozen), TOKENS, context(2, 7))[0])

    saved = jax.tree.leaves(jax.eval_shape(lambda t, f: jax.vjp(lambda t: loss(t, f), t)[1], trained, frozen))
    sizes = [leaf.size for leaf in saved if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert max(sizes) < 4 * SIZES["emb_dim"] * SIZES["mlp_dim"]


def test_inputs_not_divisible_by_the_block_size_are_rejected() -> None:
    with pytest.raises(ConfigError, match="layer/attention/query has 24 inputs"):
        _ = build(model_config(), qlora()).shapes


@pytest.mark.exhaustive
def test_engine_tokens_with_an_adapter_equal_merged_weights() -> None:
    """In the decode layout, with unstacked and transposed weights."""
    model = build(model_config(**SIZES, vocab_size=264), qlora())
    weights = noisy(jax.jit(model.init)(jax.random.key(0)))
    sharder = Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES)
    sizes = {"max_batch": 2, "cache_tokens": 64, "page_size": 8, "max_context": None, "prefill_chunk": 16}
    settings = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    said = []
    for one, params in ((model, weights), (model.base, merge_adapter(model, weights, dtype=np.dtype(np.float32)))):
        engine = Engine(one, params, ByteTokenizer(), EngineConfig(**sizes), sharder=sharder, eos=())
        try:
            request = Request(prompt=tuple(b"1+2="), max_tokens=8, stop=(), ignore_eos=True, **settings)
            said.append(engine.submit(request).result().tokens)
        finally:
            engine.close()
    assert said[0] == said[1] and len(said[0]) == 8
