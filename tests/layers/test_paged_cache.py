"""The paged cache equals no cache, is close to it in 8 bits, and is updated in place."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.layers import Context, DenseCacheSpec, PagedCacheSpec, PageTable
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh

VOCAB, PAGE = 48, 4
SINGLE = Sharder.single()
TWO_KINDS = {"local": config.Kind(attention=config.Attention(window=3)), "global": config.Kind()}
LOCAL_AND_GLOBAL = {"num_layers": 6, "kinds": TWO_KINDS, "prefix": ["global"], "pattern": ["local", "global"]}


def make(**changes) -> ModelDef:
    sizes = {"num_layers": 3, "emb_dim": 16, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    sizes |= {"vocab_size": VOCAB, "context_length": 64, "kinds": {"layer": config.Kind()}}
    return build(config.Model(**{**sizes, "dtypes": config.Dtypes(compute=config.Dtype.float32), **changes}))


def weights(model: ModelDef):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


def cache_spec(storage: str | None = None, pages: int = 11) -> PagedCacheSpec:
    return PagedCacheSpec(pages=pages, page_size=PAGE, slots=2, storage=None if storage is None else jnp.dtype(storage))


def through_pages(
    model: ModelDef, params, ids: np.ndarray, where: PagedCacheSpec, sharder: Sharder = SINGLE
) -> np.ndarray:
    """Logits of two rows of 13 and 9 tokens: two prefill chunks, then single tokens, in interleaved pages."""
    lengths, tables = [13, 9], np.array([[7, 2, 9, 4], [1, 10, 0, 0]])

    @partial(jax.jit, static_argnums=4)
    def advance(params, cache, tokens, positions, is_fresh):
        place = {"rows": PageTable(jnp.asarray(tables), jnp.arange(2)), "segments": (positions >= 0).astype(jnp.int32)}
        ctx = Context(positions=positions, sharder=sharder, cache=cache, dropout_key=None, is_fresh=is_fresh, **place)
        hidden, cache = model.hidden(params, tokens, ctx)
        return model.logits(params, hidden, sharder), cache

    # What earlier sequences left behind must not be seen: not even a number that is none.
    cache = jax.tree.map(lambda x: x if x.dtype == jnp.int8 else x + jnp.nan, model.empty_cache(where))
    if where.storage is None:
        cache = jax.tree.map(lambda x: x.at[..., ::2].set(jnp.inf), cache)
    found = np.zeros((2, 13, VOCAB), np.float32)
    for start, stop in [(0, 4), (4, 8), *((i, i + 1) for i in range(8, 13))]:
        positions = np.stack([np.where(np.arange(start, stop) < n, np.arange(start, stop), -1) for n in lengths])
        logits, cache = advance(params, cache, ids[:, start:stop], positions, start == 0)
        found[:, start:stop] = logits
    return found


def whole(model: ModelDef, params, ids: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    ctx = Context(positions=positions, segments=None, sharder=SINGLE, cache=None, dropout_key=None)
    return np.asarray(model.logits(params, jax.jit(model.hidden)(params, ids, ctx)[0], SINGLE))


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (2, 13)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.default_cases("mixed")
@pytest.mark.parametrize("shape", [{}, LOCAL_AND_GLOBAL], ids=["plain", "mixed"])
def test_pages_equal_the_forward_without_cache_and_the_dense_cache(shape):
    model = make(**shape)
    params, ids = weights(model), tokens()
    expected = whole(model, params, ids)
    paged = through_pages(model, params, ids, cache_spec())
    for row, length in enumerate((13, 9)):
        np.testing.assert_allclose(paged[row, :length], expected[row, :length], atol=1e-4)
    ctx = Context(
        positions=jnp.broadcast_to(jnp.arange(13), ids.shape),
        segments=None,
        sharder=SINGLE,
        cache=model.empty_cache(DenseCacheSpec(2, 13)),
        dropout_key=None,
    )
    dense = model.logits(params, jax.jit(model.hidden)(params, ids, ctx)[0], SINGLE)
    np.testing.assert_allclose(paged[0], dense[0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.default_cases("float8_e4m3fn-4")
@pytest.mark.parametrize(("storage", "bits"), [("int8", 7), ("float8_e4m3fn", 4)])
def test_eight_bit_cache_is_close(storage, bits):
    """The rounding error is half of the last bit; that of the logits is of this order and not zero."""
    model = make()
    params, ids = weights(model), tokens()
    expected = whole(model, params, ids)
    cache = jax.eval_shape(lambda: model.empty_cache(cache_spec(storage)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {storage, "float32"}
    error = np.abs(through_pages(model, params, ids, cache_spec(storage)) - expected)[0] / expected.std()
    assert 1e-5 < error.max() < 4 * 2.0**-bits, error.max()


@pytest.mark.slow
def test_sharded_pages_equal_one_device():
    model = make(num_kv_heads=4)
    params, ids = weights(model), tokens()
    mesh = Mesh(fsdp=2, tensor=4)
    sharder = Sharder(build_mesh(mesh, jax.devices()[:8]), RULES)
    spread = jax.device_put(params, sharder.tree(model.axes))
    found = through_pages(model, spread, ids, cache_spec(), sharder)
    np.testing.assert_allclose(found[0], through_pages(model, params, ids, cache_spec())[0], atol=1e-4)
    cache = jax.eval_shape(lambda: model.empty_cache(cache_spec("int8")))
    axes = [layer.axes() for layer in cache["pattern"]]
    assert sharder.spec(axes[0].key_GLPKZH)[3] == sharder.spec(axes[0].key_scale_GLPKZ)[3] == "tensor"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"prefix": ["layer"] * 3}], ids=["scanned", "written out"])
def test_a_step_never_copies_the_pool(shape):
    """The compiled program creates no array of the pool's size: donated buffers are updated in place."""
    model, pages = make(**shape), 977

    def step(params, cache, tokens, positions, table):
        ctx = Context(
            positions=positions,
            segments=None,
            sharder=SINGLE,
            cache=cache,
            dropout_key=None,
            rows=PageTable(table, jnp.arange(2)),
        )
        return model.hidden(params, tokens, ctx)

    cache = jax.eval_shape(lambda: model.empty_cache(cache_spec(pages=pages)))
    one, table = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2, 4), jnp.int32)
    program = jax.jit(step, donate_argnums=1).lower(model.shapes, cache, one, one, table).compile()
    made = [
        line
        for line in program.as_text().splitlines()
        if re.search(rf"= \w+\[[\d,]*\b{pages}\b[\d,]*\]\S* copy\(", line)
    ]
    assert not made
    pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool / 4
