"""Layers that share an earlier layer's keys and values, and per-layer embeddings: pages, devices, bad configs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.layers import Context, PagedCacheSpec, PageTable
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh

SINGLE = Sharder.single()
TINY = ["model=gemma4-tiny", "model.emb_dim=16", "model.mlp_dim=24", "model.vocab_size=48", "model.per_layer.dim=4"]
TINY += ["model.kinds.local.attention.window=3", "model.kinds.local_shared.attention.window=3", "train.seq_len=64"]


def tiny() -> tuple[ModelDef, dict]:
    model = build(compose(TINY).config.model)
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


def whole(model: ModelDef, params, ids: np.ndarray, sharder: Sharder = SINGLE) -> np.ndarray:
    @jax.jit
    def run(params, ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        ctx = Context(positions=positions, segments=None, sharder=sharder, cache=None, dropout_key=None)
        return model.logits(params, model.hidden(params, ids, ctx)[0], sharder)

    return np.asarray(run(params, ids))


@pytest.mark.exhaustive
def test_pages_equal_the_forward_without_cache():
    """A prefill chunk of 8 tokens, then single ones, in reused pages; sharing layers have no cache of their own."""
    model, params = tiny()
    ids = np.random.default_rng(1).integers(0, 48, (2, 12)).astype(np.int32)

    @jax.jit
    def advance(params, cache, tokens, positions):
        rows = PageTable(jnp.asarray([[7, 2, 9], [1, 8, 0]]), jnp.arange(2))
        segments = (positions >= 0).astype(jnp.int32)
        ctx = Context(positions=positions, segments=segments, sharder=SINGLE, cache=cache, dropout_key=None, rows=rows)
        hidden, cache = model.hidden(params, tokens, ctx)
        return model.logits(params, hidden, SINGLE), cache

    cache = model.empty_cache(PagedCacheSpec(pages=11, page_size=4, slots=2, storage=None))
    assert [len(jax.tree.leaves(cache[part])) for part in ("prefix", "pattern")] == [4, 0]
    cache, parts = jax.tree.map(lambda x: x + jnp.nan, cache), []
    for start, stop in [(0, 8), *((i, i + 1) for i in range(8, 12))]:
        positions = np.broadcast_to(np.arange(start, stop), (2, stop - start))
        logits, cache = advance(params, cache, ids[:, start:stop], positions)
        parts.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole(model, params, ids), atol=1e-4)


@pytest.mark.exhaustive
def test_sharded_output_equals_one_device():
    model, params = tiny()
    ids = np.random.default_rng(1).integers(0, 48, (2, 8)).astype(np.int32)
    sharder = Sharder(build_mesh(Mesh(fsdp=2, tensor=2, sequence=2)), RULES)
    placed = jax.device_put(params, sharder.tree(model.axes))
    np.testing.assert_allclose(whole(model, placed, ids, sharder), whole(model, params, ids), atol=1e-4)


@pytest.mark.slow
def test_layers_share_only_with_kinds_of_the_prefix():
    with pytest.raises(ConfigError, match=r"(?s)local_shared.attention.shares.*accepted: local, global") as error:
        compose([*TINY, "model.kinds.local_shared.attention.shares=global_shared"])
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match="has a different num_kv_heads or head_dim"):
        compose([*TINY, "model.kinds.local_shared.attention.shares=global"])
