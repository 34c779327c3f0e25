"""Mechanisms of attention, norms and ends together, in the places that golden models do not reach: rows of several
sequences, pages, devices, adapters, layouts, and configs that make no sense."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import Mesh
from maxhydra.config.schema.quantization import Adapter, AdapterKind
from maxhydra.config.schema.run import Train
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.layers import Context, PagedCacheSpec, PageTable
from maxhydra.model import ModelDef, build, merge_adapter
from maxhydra.optim import Optimizer
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss
from maxhydra.train.state import Guard, TrainState
from maxhydra.train.step import make_step

VOCAB, LENGTH, PAGE = 48, 16, 4
SINGLE = Sharder.single()
LOCAL = config.Kind(
    norms=config.Norms.post,
    attention=config.Attention(
        chunk=5,
        sinks=True,
        bias=config.AttentionBias.all,
        qk_norm=config.QkNorm.whole,
        rope=config.Rope(kind=config.RopeKind.yarn, factor=4.0, original_context=8, share=0.5),
    ),
    mlp=config.Mlp(kind=config.MlpKind.plain, bias=True),
)
GLOBAL = config.Kind(
    norms=config.Norms.sandwich,
    attention=config.Attention(
        bias=config.AttentionBias.qkv,
        qk_norm=config.QkNorm.head_plain,
        temperature=config.Temperature(floor=3, scale=0.2),
        rope=config.Rope(pairs=config.Pairs.neighbours),
    ),
    mlp=config.Mlp(bias=True),
)
EVERYTHING = config.Model(
    num_layers=2,
    emb_dim=16,
    mlp_dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    context_length=64,
    pattern=["local", "global"],
    kinds={"local": LOCAL, "global": GLOBAL},
    norm=config.Norm.layer,
    embedding=config.Embedding(scale=config.EmbeddingScale.root_dim, positions=config.Positions.learned),
    dtypes=config.Dtypes(compute=config.Dtype.float32),
)


def random_weights(model: ModelDef) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


def context(positions: Any, **changes: Any) -> Context:
    fields: dict[str, Any] = {"segments": None, "sharder": SINGLE, "cache": None, "dropout_key": None}
    return Context(positions=jnp.asarray(positions), **{**fields, **changes})


def in_order(batch: int = 2) -> np.ndarray:
    return np.broadcast_to(np.arange(LENGTH), (batch, LENGTH))


def tokens(batch: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (batch, LENGTH), 0, VOCAB)


@functools.cache
def whole() -> tuple[ModelDef, Any, np.ndarray]:
    """The model, its weights, and its logits of two rows."""
    model = build(EVERYTHING)
    params = random_weights(model)
    return model, params, np.asarray(jax.jit(model.hidden)(params, tokens(), context(in_order()))[0])


@pytest.mark.slow
def test_chunks_and_positions_restart_with_each_packed_sequence() -> None:
    model, params, expected = whole()
    first, second = 9, LENGTH - 11
    ids = tokens()
    row = jnp.concatenate([ids[0, :first], jnp.zeros(2, jnp.int32), ids[1, :second]])[None]
    positions = np.concatenate([np.arange(first), [0, 0], np.arange(second)])[None]
    segments = jnp.asarray([[1] * first + [0] * 2 + [2] * second])
    hidden = jax.jit(model.hidden)(params, row, context(positions, segments=segments))[0]
    np.testing.assert_allclose(hidden[0, :first], expected[0, :first], atol=2e-5)
    np.testing.assert_allclose(hidden[0, first + 2 :], expected[1, :second], atol=2e-5)


@pytest.mark.slow
def test_paged_decode_equals_the_full_forward_pass() -> None:
    model, params, expected = whole()
    rows = PageTable(jnp.asarray([[7, 2, 5, 4], [1, 0, 3, 6]]), jnp.arange(2))
    cache = model.empty_cache(PagedCacheSpec(pages=8, page_size=PAGE, slots=2, storage=None))
    advance = jax.jit(model.hidden)
    for start, stop in [(0, 12), *((i, i + 1) for i in range(12, LENGTH))]:
        ctx = context(in_order()[:, start:stop], cache=cache, rows=rows)
        hidden, cache = advance(params, tokens()[:, start:stop], ctx)
        np.testing.assert_allclose(hidden, expected[:, start:stop], atol=2e-5)


@pytest.mark.slow
def test_sharded_output_equals_one_device() -> None:
    model, params, expected = whole()
    mesh = Mesh(fsdp=2, sequence=2, tensor=2)
    sharder = Sharder(build_mesh(mesh, jax.devices()[:8]), mesh.rules)
    placed = jax.device_put(params, sharder.tree(model.axes))
    hidden = jax.jit(model.hidden)(placed, tokens(), context(in_order(), sharder=sharder))[0]
    np.testing.assert_allclose(hidden, expected, atol=2e-5)


@pytest.mark.slow
def test_adapter_merges_into_projections_with_biases() -> None:
    adapter = Adapter(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0, targets=["attention/query", "mlp/down"])
    model = build(EVERYTHING, adapter)
    params = random_weights(model)
    without = merge_adapter(model, params, dtype=np.dtype(np.float32))
    assert jax.tree.map(jnp.shape, without) == jax.tree.map(lambda leaf: leaf.shape, model.base.shapes)
    expected = jax.jit(model.hidden)(params, tokens(), context(in_order()))[0]
    found = jax.jit(model.base.hidden)(without, tokens(), context(in_order()))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.exhaustive
def test_constant_parameters_are_not_trained() -> None:
    """Neither gradients nor weight decay change them."""
    kind = dataclasses.replace(GLOBAL, is_scaled=True)
    model = build(
        dataclasses.replace(EVERYTHING, num_layers=3, prefix=["global"], kinds={"local": LOCAL, "global": kind})
    )
    optimizer, train = Optimizer(optax.adamw(0.1, weight_decay=0.1), schedule=lambda step: 0.1), Train()
    params = random_weights(model)
    rest = {"opt_state": optimizer.transform.init(params), "key": jax.random.key_data(jax.random.key(0))}
    state = TrainState(step=jnp.zeros((), jnp.int32), params=params, frozen={}, guard=Guard.fresh(), **rest)
    step = make_step(next_token_loss(model, SINGLE, train), optimizer, train, model.apply_aux_updates)
    batch = {"tokens": tokens(), "targets": tokens(), "positions": in_order(), "weights": jnp.ones(tokens().shape)}
    moved = jax.jit(step)(state, batch)[0].params
    for group, place in (("prefix", "0"), ("pattern", "1")):
        np.testing.assert_array_equal(moved[group][place]["scale"], params[group][place]["scale"])
    assert np.any(moved["pattern"]["1"]["mlp_norm"]["scale"] != params["pattern"]["1"]["mlp_norm"]["scale"])


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_decode_layout_equals_the_training_layout(platform: str) -> None:
    model, params, _ = whole()
    arrangement = choose_weight_layout(model, SINGLE, platform)
    used = arrangement.use(arrangement.keep(params))
    jax.tree.map(np.testing.assert_array_equal, used["prefix"], arrangement.unstack(params)["prefix"])
    np.testing.assert_array_equal(used["embedding"]["positions"], params["embedding"]["positions"])


@pytest.mark.parametrize(
    ("section", "path", "reason"),
    [
        (config.Attention(window=3, chunk=4), "chunk", "cannot be combined with window=3"),
        (config.Temperature(floor=8), "scale", "is required together with floor"),
        (config.Rope(kind=config.RopeKind.yarn, factor=2.0), "original_context", "is needed by kind=yarn"),
        (config.Rope(kind=config.RopeKind.linear), "factor", "is needed by kind=linear"),
        (config.Rope(truncate=False), "truncate", "is not used by kind=default"),
        (config.Rope(factor=2.0), "factor", "is not used by kind=default"),
        (
            config.Rope(kind=config.RopeKind.yarn, factor=2.0, original_context=8, beta_fast=0.5),
            "beta_slow",
            "is larger than beta_fast",
        ),
    ],
)
def test_invalid_settings_are_named(section: Any, path: str, reason: str) -> None:
    assert [(problem.path, problem.reason) for problem in section.check()] == [(path, reason)]


@pytest.mark.slow
def test_partial_rope_needs_an_even_number_of_dimensions() -> None:
    kind = config.Kind(attention=config.Attention(rope=config.Rope(share=0.4)))
    sizes = {"num_layers": 1, "emb_dim": 16, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    model = config.Model(**sizes, vocab_size=8, context_length=8, kinds={"layer": kind})
    assert [problem.path for problem in model.check()] == ["kinds.layer.attention.rope.share"]
