"""The products of a layer behind attention as one: the oracle against NumPy, a model whose layers are made of it, and
the kernel where there is no Hopper: it lowers for one, and every weight has one program. Its values need the GPU, by
`bench/kernels.py chain`: Mosaic's interpreter has no semaphores."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import model as config
from maxhydra.decode.arrange import arrange
from maxhydra.kernels.fused_product import Norm
from maxhydra.kernels.product_chain import Weights, product_chain, reference, suits
from maxhydra.kernels.product_chain.plan import BLOCK, Plan
from maxhydra.layers import Context, PagedRoom, Rows
from maxhydra.layers import fused as fused_layers
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder

SINGLE = Sharder.single()
LLAMA_1B = (2048, 2048, 8192)


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unit(x: np.ndarray, scale: np.ndarray, norm: Norm) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + norm.eps) * (scale + norm.offset)


def test_the_products_equal_numpy() -> None:
    mixed, onto, scales = draw(3, 16, seed=0), draw(3, 8, seed=1), draw(2, 8, seed=2)
    weights = Weights(draw(8, 16, seed=3), draw(24, 8, seed=4), draw(8, 12, seed=5), draw(20, 8, seed=6))
    norms = tuple(Norm(jnp.asarray(scale), offset=1.0, eps=0.1) for scale in scales)
    found, heads = product_chain(jnp.asarray(mixed), jnp.asarray(onto), weights, norms, jax.nn.silu)
    x = onto + mixed @ weights.out_DA.T
    gate, up = np.split(unit(x, scales[0], norms[0]) @ weights.gate_up_2FD.T, 2, axis=1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ weights.down_DF.T
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(heads, unit(x, scales[1], norms[1]) @ weights.heads_QD.T, rtol=1e-4, atol=1e-4)


def test_only_a_hopper_has_the_kernel() -> None:
    assert Plan(*LLAMA_1B, Q=3072).fits
    assert not Plan(2048, 2048, 8192 + 64).fits
    assert not suits(64, LLAMA_1B, jnp.bfloat16)


@pytest.mark.parametrize("heads", [None, 3072])
def test_every_weight_has_one_program(heads: int | None) -> None:
    plan = Plan(*LLAMA_1B, Q=heads)
    sizes = [(2048, 2048), (2 * 8192, 2048), (2048, 8192), (3072, 2048)]
    for share, (outputs, inputs) in zip(plan.shares, sizes, strict=False):
        assert plan.programs * share.outputs * share.blocks * BLOCK == outputs * inputs
        assert share.slots * share.in_slot == share.blocks


@pytest.mark.parametrize("heads", [None, 3072])
def test_the_kernel_lowers_for_hopper(heads: int | None) -> None:
    from maxhydra.kernels.product_chain.mosaic import chain

    plan, shape = Plan(*LLAMA_1B, Q=heads), lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    arrays = [shape(64, 2048), shape(64, 2048), shape(2048)]
    of_heads = None if heads is None else shape(heads, 2048)
    weights = Weights(shape(2048, 2048), shape(16384, 2048), shape(2048, 8192), of_heads)

    def layer(mixed, onto, scale, weights):
        return chain(mixed, onto, weights, (Norm(scale, 0.0, 1e-5),) * plan.norms, jax.nn.silu, plan=plan)

    traced = jax.jit(layer).trace(*arrays, weights)
    assert traced.out_info[0].shape == (64, 2048)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


def model(pattern: list[str]) -> ModelDef:
    sizes = {"num_layers": 3, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    kinds = {"plain": config.Kind(), "sandwich": config.Kind(norms=config.Norms.sandwich)}
    fields = {**sizes, "vocab_size": 50, "context_length": 64, "kinds": kinds, "pattern": pattern}
    return build(config.Model(**fields, dtypes=config.Dtypes(compute=config.Dtype.float32)))


def logits_of_steps(model: ModelDef, params: dict, rows: int) -> np.ndarray:
    """Of four tokens of each row, over pages."""
    cache = model.empty_cache(PagedRoom(2 * rows, 4, slots=rows, storage=None))
    place = Rows(jnp.arange(2 * rows).reshape(rows, 2), jnp.arange(rows))
    ones = jnp.ones((rows, 1), jnp.int32)

    @jax.jit
    def step(cache: dict, position: jax.Array) -> tuple[jax.Array, dict]:
        context = Context(
            positions=position * ones, segments=ones, sharder=SINGLE, cache=cache, dropout_key=None, rows=place
        )
        hidden, cache = model.hidden(params, position + jnp.arange(rows)[:, None], context)
        return model.logits(params, hidden, SINGLE), cache

    found = []
    for position in range(4):
        logits, cache = step(cache, jnp.int32(position))
        found.append(logits)
    return np.stack(found)


@pytest.mark.parametrize(
    ("pattern", "made"), [(["plain"], [True, True, False]), (["plain", "sandwich"], [False, False])]
)
def test_a_model_gives_the_same_with_and_without(
    pattern: list[str], made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that have nothing but a norm before each part are chained, and make the heads of a next one like them."""
    plain = model(pattern)
    params = plain.base.init(jax.random.key(0))
    arranged = arrange(plain, SINGLE, "gpu")
    calls: list[bool] = []

    def chain(mixed, onto, weights, norms, activation):
        calls.append(weights.heads_QD is not None)
        return reference.chain(mixed, onto, weights, norms, activation)

    stand_in = SimpleNamespace(Weights=Weights, suits=lambda *_: True, product_chain=chain)
    monkeypatch.setattr(fused_layers, "product_chain", stand_in)
    found = logits_of_steps(arranged.model, arranged.use(arranged.keep(params)), rows=3)
    assert calls == made
    np.testing.assert_allclose(found, logits_of_steps(plain, params, rows=3), rtol=2e-4, atol=2e-4)
