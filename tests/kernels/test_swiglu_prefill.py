"""Products of many rows that take their gate along, and prompts that go into whole pages: what reads a prompt."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.kernels.fused_linear import Epilogue, fused_linear, swiglu_prefill
from maxhydra.kernels.fused_linear.swiglu_prefill_mosaic import swiglu_matmul
from maxhydra.kernels.grouped_matmul.mosaic import KernelParams
from maxhydra.kernels.paged_attention import Pages
from maxhydra.kernels.paged_attention.pages import write_prompts
from maxhydra.kernels.placement import Placement
from maxhydra.layers import Context, PagedCacheSpec, PageTable
from maxhydra.layers import attention as attention_layers
from maxhydra.layers import fused_decode as fused_layers
from maxhydra.model import ModelDef
from tests.kernels.test_fused_linear import SINGLE, draw, expected, model
from tests.support.hopper import run


def test_many_rows_take_their_gate_along() -> None:
    """Tiles of several programs, bands of rows, and more columns than a tile has."""
    x, weight = (
        jnp.asarray(draw(*shape, seed=seed), "bfloat16") for seed, shape in enumerate(((512, 128), (512, 128)))
    )
    how = KernelParams(columns=256, stages=2, band=2, processors=3)
    got = run(lambda x, weight: swiglu_matmul(how, x, weight, jax.nn.silu), x, weight)
    reference_output = expected(np.asarray(x), np.asarray(weight), Epilogue(activation=jax.nn.silu))
    np.testing.assert_allclose(
        np.asarray(got, np.float64), reference_output, rtol=1e-2, atol=1e-2 * np.abs(reference_output).max()
    )


@pytest.mark.slow
def test_the_kernel_of_many_rows_lowers_where_there_is_no_hopper() -> None:
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 512), (1024, 512)))
    lowered = jax.jit(lambda x, weight: swiglu_prefill.swiglu_matmul(x, weight, jax.nn.silu)).trace(x, weight)
    assert lowered.out_info.shape == (1024, 512)
    assert lowered.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1
    assert not swiglu_prefill.is_supported(1024, 512, 512, "bfloat16", jax.nn.silu)


def prompts_read(model: ModelDef, params: dict) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of three prompts of 8, 5 and 3 tokens that begin, and the pages with them."""
    cache = model.empty_cache(PagedCacheSpec(9, 4, slots=3, storage=None))
    place, lengths = PageTable(jnp.arange(9)[::-1].reshape(3, 3), jnp.arange(3)), jnp.array([8, 5, 3])
    positions = jnp.where(jnp.arange(8) < lengths[:, None], jnp.arange(8), -1)
    is_token = (positions >= 0).astype(jnp.int32)
    context = Context(
        positions=positions, segments=is_token, sharder=SINGLE, cache=cache, dropout_key=None, rows=place, is_fresh=True
    )
    tokens = 1 + jnp.arange(24).reshape(3, 8)
    hidden, cache = jax.jit(lambda params: model.hidden(params, tokens, context))(params)
    logits = np.asarray(model.logits(params, hidden, SINGLE))[np.asarray(is_token) > 0]
    return logits, [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]


@pytest.mark.exhaustive
def test_prompts_are_the_same_with_their_gates_taken_along_and_pages_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """These few rows go the way of many."""
    packed, filled, activations = model(is_int8=False), [], []
    params = packed.base.init(jax.random.key(0))
    plain, plain_pages = prompts_read(packed, params)
    arranged = choose_weight_layout(packed, SINGLE, "gpu")

    def fill(pages: Pages, key: jax.Array, value: jax.Array, place: Placement) -> Pages:
        filled.append(key.shape)
        return write_prompts(pages, key, value, interpret=True)

    def product(*arguments: Any, **options: Any) -> jax.Array:
        activations.append(arguments[3].activation)
        return fused_linear(*arguments, **options)

    monkeypatch.setattr(fused_layers, "prefers_fusion", lambda *_: False)
    monkeypatch.setattr(fused_layers, "supports_swiglu", lambda *_: True)
    monkeypatch.setattr(fused_layers, "fused_linear", product)
    monkeypatch.setattr(attention_layers, "write_prompts", fill)
    logits, pages = prompts_read(arranged.model, arranged.use(arranged.keep(params)))
    assert filled == [(3, 8, 2, 8)] * 3 and activations == [jax.nn.silu] * 3
    np.testing.assert_allclose(logits, plain, rtol=1e-4, atol=1e-5)
    for found, reference_output in zip(pages, plain_pages, strict=True):
        np.testing.assert_allclose(found, reference_output, rtol=1e-4, atol=1e-5)
