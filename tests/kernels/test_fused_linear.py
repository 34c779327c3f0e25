"""Small-batch matmuls with fused prologues and epilogues against NumPy, and a model built from them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import Quantization, QuantizationKind
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.kernels.fused_linear import (
    Epilogue,
    NormParams,
    argmax,
    embed_norm,
    fused_linear,
    gemv,
    matmul_add_norm,
    small_batch,
)
from maxhydra.kernels.fused_linear import split_k_reduce as row_kernel
from maxhydra.kernels.matmul import Layout
from maxhydra.kernels.paged_attention import triton as pages_kernel
from maxhydra.layers import Context, DenseCacheSpec, MatmulSpec, PagedCacheSpec, PageTable, ParamBuilder
from maxhydra.layers import attention as attention_layers
from maxhydra.layers import fused_decode as fused_layers
from maxhydra.model import ModelDef, build, fused_block, map_leaves, pattern, store_weight
from maxhydra.model.block import Block, BlockSpec
from maxhydra.model.fused_block import FusedBlock, block_class
from maxhydra.sharding import Sharder

SINGLE = Sharder.single()
FLOAT32 = jnp.dtype(jnp.float32)


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def expected(x: np.ndarray, weight: np.ndarray, epilogue: Epilogue) -> np.ndarray:
    """The reference in float64."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    if epilogue.norm is not None:
        scale = np.asarray(epilogue.norm.scale_K, np.float64) + epilogue.norm.offset
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + epilogue.norm.eps) * scale
    out = x @ weight.T
    if epilogue.activation is not None:
        gate, value = np.split(out, 2, axis=1)
        out = silu(gate) * value
    return out if epilogue.residual_MN is None else out + np.asarray(epilogue.residual_MN, np.float64)


def surroundings(rows: int, inputs: int, outputs: int, dtype: jnp.dtype) -> dict[str, Epilogue]:
    norm = NormParams(jnp.asarray(draw(inputs, seed=3), dtype), offset=1.0, eps=0.1)
    onto = jnp.asarray(draw(rows, outputs, seed=4), dtype)
    return {
        "nothing": Epilogue(),
        "norm and gate": Epilogue(norm=norm, activation=jax.nn.silu),
        "norm and onto": Epilogue(norm=norm._replace(offset=0.0), residual_MN=onto),
    }


@pytest.mark.slow
@pytest.mark.default_cases(
    "tile0-True-bfloat16-norm and gate", "tile1-True-float32-norm and onto", "tile2-False-bfloat16-nothing"
)
@pytest.mark.parametrize("name", ["nothing", "norm and gate", "norm and onto"])
@pytest.mark.parametrize(
    ("tile", "is_int8", "dtype"),
    [
        (gemv.Tile(2, 1, 64, 1), True, jnp.bfloat16),
        (gemv.Tile(1, 4, 32, 4), True, jnp.float32),
        (gemv.Tile(2, 4, 64, 1), False, jnp.bfloat16),
    ],
)
def test_one_row_equals_numpy(tile: gemv.Tile, is_int8: bool, dtype: jnp.dtype, name: str) -> None:
    outputs, inputs = 16, 128
    epilogue = surroundings(1, inputs, outputs, dtype)[name]
    halves = 1 if epilogue.activation is None else 2
    x = jnp.asarray(draw(1, inputs, seed=0), dtype)
    if is_int8:
        weight = np.random.default_rng(1).integers(-127, 128, (halves * outputs, inputs)).astype(np.int8)
        scales = 0.01 * np.abs(draw(halves * outputs, seed=2)) + 0.001
        whole = weight * scales[:, None]
    else:
        weight = whole = np.asarray(jnp.asarray(draw(halves * outputs, inputs, seed=1), dtype), np.float32)
        scales = None
    found = gemv.gemv_linear(
        x,
        jnp.asarray(weight, jnp.int8 if is_int8 else dtype),
        None if scales is None else jnp.asarray(scales),
        epilogue,
        FLOAT32,
        interpret=True,
        tile=tile,
    )
    np.testing.assert_allclose(found, expected(np.asarray(x, np.float32), whole, epilogue), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "norm and gate", "norm and onto"])
@pytest.mark.parametrize(("rows", "parts", "is_left"), [(5, 1, False), (5, 2, True), (16, 1, True)])
def test_small_batches_equal_numpy(rows: int, parts: int, is_left: bool, name: str) -> None:
    """A gated activation is not linear, so its inputs are not split."""
    outputs, inputs = 32, 64
    epilogue = surroundings(rows, inputs, outputs, FLOAT32)[name]
    x, weight = draw(rows, inputs, seed=0), draw(outputs * (2 if epilogue.activation else 1), inputs, seed=1)
    tile = small_batch.Tile(16, 16, 1 if epilogue.activation else parts, is_left=is_left, warps=4, stages=2)
    found = small_batch.small_batch_linear(
        jnp.asarray(x), jnp.asarray(weight), epilogue, FLOAT32, interpret=True, tile=tile
    )
    np.testing.assert_allclose(found, expected(x, weight, epilogue), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbers", [256, 768])
def test_split_k_reduction_and_norm_equal_numpy(numbers: int) -> None:
    parts, onto, scale = draw(4, 5, numbers, seed=0), draw(5, numbers, seed=1), draw(numbers, seed=2)
    norm = NormParams(jnp.asarray(scale), offset=1.0, eps=0.1)
    found = row_kernel.reduce_add_norm(jnp.asarray(parts), jnp.asarray(onto), norm, FLOAT32, interpret=True)
    stream = onto + np.sum(parts.astype(np.float64), axis=0)
    unit = stream / np.sqrt(np.mean(stream**2, axis=1, keepdims=True) + norm.eps)
    np.testing.assert_allclose(found[0], stream, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], unit * (scale + norm.offset), rtol=1e-5, atol=1e-5)
    assert row_kernel.is_supported(numbers) and not row_kernel.is_supported(numbers + 64)


def test_embedding_lookup_and_norm_equal_numpy() -> None:
    """A token outside the table gives NaN."""
    table, scale, tokens = draw(7, 768, seed=0), draw(768, seed=1), np.array([6, 0, 7, 3, -1])
    norm = NormParams(jnp.asarray(scale), offset=1.0, eps=0.1)
    stream, normed = embed_norm.embed_and_norm(jnp.asarray(table), jnp.asarray(tokens), norm, interpret=True)
    is_there = (tokens >= 0) & (tokens < 7)
    reference_output = table[np.where(is_there, tokens, 0)]
    unit = reference_output / np.sqrt(np.mean(reference_output**2, axis=1, keepdims=True) + norm.eps)
    np.testing.assert_array_equal(stream, np.where(is_there[:, None], reference_output, np.nan))
    np.testing.assert_allclose(normed, np.where(is_there[:, None], unit * (scale + 1), np.nan), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "is_left", "dtype"), [(5, True, jnp.float32), (16, False, jnp.bfloat16)])
def test_argmax_equals_numpy(rows: int, is_left: bool, dtype: jnp.dtype) -> None:
    """Ties select the first index, and NaN propagates to the maximum."""
    x, weight = draw(rows, 64, seed=0), draw(96, 64, seed=1)
    weight[40], x[2] = weight[7], weight[7]
    tile = small_batch.Tile(16, 32, 1, is_left=is_left, warps=4, stages=2)
    run = partial(
        argmax.matmul_argmax, weight_NK=jnp.asarray(weight), dtype=jnp.dtype(dtype), interpret=True, tile=tile
    )
    top, place = run(jnp.asarray(x))
    out = np.asarray(jnp.asarray(x @ weight.T, dtype), np.float32)
    np.testing.assert_allclose(top, out.max(axis=1), rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5)
    assert place.tolist() == out.argmax(axis=1).tolist() and place[2] == 7
    x[1, 3] = np.nan
    assert np.isfinite(run(jnp.asarray(x))[0]).tolist() == [row != 1 for row in range(rows)]


@pytest.mark.parametrize("rows", [1, 3])
def test_reference_path_equals_the_kernel(rows: int) -> None:
    epilogue = surroundings(rows, 64, 16, FLOAT32)["norm and gate"]
    x, weight = draw(rows, 64, seed=0), draw(32, 64, seed=1)
    found = fused_linear(jnp.asarray(x), jnp.asarray(weight), None, epilogue, dtype=jnp.float32)
    np.testing.assert_allclose(found, expected(x, weight, epilogue), rtol=1e-4, atol=1e-4)


def model(is_int8: bool) -> ModelDef:
    """Two layers that can be fused, and between or after them one with post-norms, which cannot."""
    sizes = {"num_layers": 3, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    kinds = {"plain": config.Kind(), "sandwich": config.Kind(norms=config.Norms.sandwich)}
    pattern = ["plain", "sandwich", "plain"] if is_int8 else ["plain", "plain", "sandwich"]
    fields = {**sizes, "vocab_size": 50, "context_length": 64, "kinds": kinds, "pattern": pattern}
    dtypes = config.Dtypes(compute=config.Dtype.float32)
    kind = QuantizationKind.int8_weights if is_int8 else QuantizationKind.none
    targets = ["attention/", "mlp/"] if is_int8 else []
    return build(config.Model(**fields, dtypes=dtypes), None, Quantization(kind=kind, targets=targets))


def tokens_drawn(model: ModelDef, params: dict, rows: int) -> list[list[int]]:
    """Six greedy tokens of each row, with a paged cache."""
    cache = model.empty_cache(PagedCacheSpec(2 * rows, 4, slots=rows, storage=None))
    place = PageTable(jnp.arange(2 * rows).reshape(rows, 2), jnp.arange(rows))
    last, drawn = jnp.arange(1, rows + 1)[:, None], []

    @jax.jit
    def step(cache: dict, last: jax.Array, position: jax.Array) -> tuple[jax.Array, dict]:
        positions = jnp.full((rows, 1), position)
        segments = jnp.ones((rows, 1), jnp.int32)
        context = Context(
            positions=positions, segments=segments, sharder=SINGLE, cache=cache, dropout_key=None, rows=place
        )
        hidden, cache = model.hidden(params, last, context)
        return jnp.argmax(model.logits(params, hidden, SINGLE), axis=-1), cache

    for position in range(6):
        last, cache = step(cache, last, jnp.int32(position))
        drawn.append(np.asarray(last)[:, 0].tolist())
    return drawn


@pytest.mark.exhaustive
def test_fused_block_equals_block() -> None:
    """The same weights and inputs, with the norm of the input and of the next layer fused or not."""
    spec = BlockSpec.of(model(is_int8=False).config, "plain")
    matmul = MatmulSpec(compute=np.dtype(np.float32), layout=Layout.joined)
    assert block_class(spec, matmul) is FusedBlock
    make = ParamBuilder(jax.random.key(0), dtype=np.dtype(np.float32), layers=None, matmul_spec=matmul)
    fused = FusedBlock(spec, make.below("plain"))
    plain = nnx.merge(nnx.graphdef(Block(spec, make.below("plain"))), nnx.state(fused))
    x_BTD, scale_D = jnp.asarray(draw(3, 1, 32, seed=5)), jnp.asarray(draw(32, seed=6))
    cache = plain.empty_cache(DenseCacheSpec(3, 8), layers=1).at(0)
    positions = jnp.zeros((3, 1), jnp.int32)
    context = Context(positions=positions, segments=None, sharder=SINGLE, cache=cache, dropout_key=None)
    expected_out = plain(x_BTD, context)
    out, next_BTD = fused.run(x_BTD, context, plain.attention_norm(x_BTD), scale_D)
    alone = fused(x_BTD, context)
    for found in (out, alone):
        for array, reference_output in zip(jax.tree.leaves(found), jax.tree.leaves(expected_out), strict=True):
            np.testing.assert_allclose(array, reference_output, rtol=1e-5, atol=1e-5)
    x = np.asarray(expected_out.x_BTD, np.float64)
    unit = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + spec.norm.eps)
    np.testing.assert_allclose(next_BTD, unit * np.asarray(scale_D), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.default_cases("1-True-expected0")
@pytest.mark.parametrize(("rows", "is_int8", "expected"), [(1, True, (4, 0)), (3, False, (5, 3))])
def test_greedy_tokens_equal_the_unfused_model(
    rows: int, is_int8: bool, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of four matmuls each, traced once if equal; with several rows some also compute the following norm."""
    pattern.as_traced_once.cache_clear()
    packed = model(is_int8)
    plain = packed.base.init(jax.random.key(0))
    params = map_leaves(plain, partial(store_weight, packed)) if is_int8 else plain
    arranged = choose_weight_layout(packed, SINGLE, "gpu")
    used = arranged.use(arranged.keep(params))
    calls = []
    for product in (fused_linear, matmul_add_norm):
        counted = partial(lambda product, *a, **k: calls.append(product) or product(*a, **k), product)
        monkeypatch.setattr(fused_layers, product.__name__, counted)
    fused = tokens_drawn(arranged.model, used, rows)
    assert (calls.count(fused_linear), calls.count(matmul_add_norm)) == expected
    assert fused == tokens_drawn(packed, params, rows)
    assert len({tuple(step) for step in fused}) > 1


@pytest.mark.slow
def test_greedy_tokens_equal_with_split_k_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paged attention kernel reduces split-K partial sums of query, key and value; all in interpret mode."""
    pattern.as_traced_once.cache_clear()
    packed, asked = model(is_int8=False), []
    params = packed.base.init(jax.random.key(0))
    plain = tokens_drawn(packed, params, 3)
    arranged = choose_weight_layout(packed, SINGLE, "gpu")

    def parts(x_MK: jax.Array, weight_NK: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
        asked.append(weight_NK.shape)
        tile = small_batch.Tile(16, 16, 2, is_left=False, warps=4, stages=2)
        return small_batch.partial_sums(x_MK, weight_NK, Epilogue(), jnp.dtype(dtype), interpret=True, tile=tile)

    def over_pages(*arguments: Any, then: Any, backend: str, place: Any) -> Any:
        return pages_kernel.attention(*arguments, interpret=True)

    monkeypatch.setattr(fused_block, "embed_and_norm", partial(embed_norm.embed_and_norm, interpret=True))
    monkeypatch.setattr(fused_layers, "split_k_matmul", parts)
    monkeypatch.setattr(attention_layers, "find_backend", lambda *_: "triton")
    monkeypatch.setattr(attention_layers, "paged_attention", over_pages)
    assert tokens_drawn(arranged.model, arranged.use(arranged.keep(params)), 3) == plain
    assert asked == [(64, 32)] * 2
    assert small_batch.choose_tile(3072, 2048, 1).parts == 2
