"""Multi-head latent attention and its indexer against the papers' formulas in NumPy; caches and devices."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxhydra.config import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.quantization import QuantizationKind
from maxhydra.kernels.matmul import Layout
from maxhydra.layers import (
    Context,
    DenseCacheSpec,
    LoraSpec,
    MatmulSpec,
    Mla,
    MlaSpec,
    PagedCacheSpec,
    PageTable,
    ParamBuilder,
    QuantRule,
    with_aux_losses,
)
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.sharding.sharder import MeshOptions

BATCH, LENGTH, WIDTH, HEADS = 2, 14, 24, 4
PLAIN, TURNED, VALUE, LATENT, NARROW = 6, 4, 5, 12, 16
TOP_K, INDEX_HEADS, INDEX_DIM = 4, 9, 10
SPARSE = {"q_lora_rank": NARROW, "indexer": config.Indexer(top_k=TOP_K, num_heads=INDEX_HEADS, head_dim=INDEX_DIM)}


def make_model(**changes) -> config.Model:
    own = {"kv_lora_rank": LATENT, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": TURNED, "v_head_dim": VALUE}
    rope = config.Rope(theta=100.0, pairs=config.Pairs.neighbours)
    kind = config.Kind(mixer=config.Mixer.mla, mla=config.Mla(**{**own, "rope": rope, **changes}))
    return config.Model(
        num_layers=2,
        emb_dim=WIDTH,
        mlp_dim=32,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=8,
        vocab_size=50,
        context_length=64,
        kinds={"layer": kind},
        dtypes=config.Dtypes(compute=config.Dtype.float32),
    )


def make_layer(model: config.Model, **matmul_options) -> Mla:
    float32 = jnp.dtype("float32")
    spec = MatmulSpec(compute=float32, layout=Layout.plain, **matmul_options)
    make = ParamBuilder(jax.random.key(0), dtype=float32, layers=None, matmul_spec=spec)
    return MlaSpec.of(model, model.kinds["layer"]).build(make)


def random_layer(model: config.Model, **matmul_options) -> Mla:
    """A layer with random values in all weights, vectors and adapter included."""
    graphdef, weights = nnx.split(make_layer(model, **matmul_options))
    leaves, structure = jax.tree.flatten(weights)
    rng = np.random.default_rng(1)
    random_weights = [jnp.asarray(rng.normal(size=leaf.shape) * 0.4 + (leaf.ndim == 1), jnp.float32) for leaf in leaves]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, random_weights))


def run(layer: Mla, x, ctx: Context):
    graphdef, weights = nnx.split(layer)
    return jax.jit(lambda weights, x, ctx: nnx.merge(graphdef, weights)(x, ctx))(weights, x, ctx)


def make_context(**changes) -> Context:
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    fields = {"positions": positions, "segments": None, "sharder": Sharder.single(), "cache": None, "dropout_key": None}
    return Context(**{**fields, **changes})


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def turned(x, positions, *, neighbours: bool):
    """Rotate x [..., T, H] as complex numbers by 100^(-2i/H) radians per token."""
    half = x.shape[-1] // 2
    real, imaginary = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    whole = (real + 1j * imaginary) * np.exp(1j * positions[:, None] * 100.0 ** (-np.arange(half) / half))
    return np.concatenate([whole.real, whole.imag], axis=-1)


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@dataclasses.dataclass
class Transcription:
    """One row x [T, D], in float64."""

    out: np.ndarray
    kl: float
    """Mean over tokens of KL(attention, summed over heads || softmax of the scores)."""


def transcribed(layer: Mla, x: np.ndarray) -> Transcription:
    """DeepSeek-V2, equations 37 to 47; DeepSeek-V3.2, equations 1 to 4."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(layer)))
    x, places = x.astype(np.float64), np.arange(len(x))
    turn = partial(turned, positions=places)
    narrow = x
    if "query_down" in w:
        narrow = rms(x @ w["query_down"]["kernel"], w["query_norm"]["scale"])
    q = np.einsum("tq,qnh->nth", narrow, w["query_up" if "query_down" in w else "query"]["kernel"])
    q = np.concatenate([q[..., :PLAIN], turn(q[..., PLAIN:], neighbours=True)], axis=-1)
    latent, shared = np.split(x @ w["latent"]["kernel"], [LATENT], axis=-1)
    kv = np.einsum("tr,rnh->nth", rms(latent, w["latent_norm"]["scale"]), w["key_value"]["kernel"])
    shared = np.broadcast_to(turn(shared, neighbours=True), (HEADS, len(x), TURNED))
    k, v = np.concatenate([kv[..., :PLAIN], shared], axis=-1), kv[..., PLAIN:]
    seen = places[None] <= places[:, None]
    scores = None
    if "indexer" in w:
        own = w["indexer"]
        key = x @ own["key"]["kernel"]
        key = (key - key.mean(-1, keepdims=True)) / np.sqrt(key.var(-1, keepdims=True) + 1e-6)
        key = key * own["key_norm"]["scale"] + own["key_norm"]["bias"]
        query = np.einsum("tq,qni->nti", narrow, own["query"]["kernel"])
        key, query = (
            np.concatenate([turn(y[..., :TURNED], neighbours=False), y[..., TURNED:]], axis=-1) for y in (key, query)
        )
        heads = np.maximum(np.einsum("nti,si->nts", query, key), 0)
        scores = np.einsum("tn,nts->ts", x @ own["weight"]["kernel"], heads) / np.sqrt(INDEX_HEADS * INDEX_DIM)
        best = np.sort(np.where(seen, scores, -np.inf), axis=-1)[:, -TOP_K][:, None]
        seen = seen & (scores >= best)
    logits = np.einsum("nth,nsh->nts", q, k) / np.sqrt(PLAIN + TURNED)
    weights = softmax(np.where(seen, logits, -np.inf))
    out = np.einsum("nts,nsv,nvd->td", weights, v, w["out"]["kernel"])
    if scores is None:
        return Transcription(out, 0.0)
    p, index = weights.mean(0), softmax(np.where(seen, scores, -np.inf))
    return Transcription(out, np.mean(np.sum(np.where(p > 0, p * np.log(p / np.where(p > 0, index, 1)), 0), axis=-1)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.default_cases("plain", "sparse")
@pytest.mark.parametrize("kind", [{}, {"q_lora_rank": NARROW}, SPARSE], ids=["plain", "narrow", "sparse"])
def test_layer_equals_the_formulas_of_the_paper(kind):
    layer, x = random_layer(make_model(**kind)), inputs()
    found = run(layer, x, make_context())
    expected = [transcribed(layer, row) for row in x]
    for row, want in zip(found.out_BTD, expected, strict=True):
        np.testing.assert_allclose(row, want.out, atol=2e-5)
    if kind is SPARSE:
        np.testing.assert_allclose(
            with_aux_losses(found.aux)["loss"], np.mean([want.kl for want in expected]), rtol=1e-5
        )
    else:
        assert found.aux == {}


@pytest.mark.slow
@pytest.mark.default_cases("dense-plain", "paged-sparse")
@pytest.mark.parametrize("kind", [{}, SPARSE], ids=["plain", "sparse"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
def test_latent_cache_equals_the_full_forward_pass(kind, is_paged):
    """Prefill with expanded keys and values, then steps of two tokens and of one with absorbed projections."""
    layer, x = random_layer(make_model(**kind)), inputs()
    expected = run(layer, x, make_context()).out_BTD
    cache_spec = PagedCacheSpec(pages=9, page_size=4, slots=2, storage=None) if is_paged else DenseCacheSpec(BATCH, 16)
    rows = PageTable(jnp.asarray([[3, 1, 7, 5], [0, 2, 8, 6]]), jnp.arange(2)) if is_paged else None
    whole = layer.empty_cache(cache_spec, 1)
    cached = TURNED + LATENT + (INDEX_DIM if kind is SPARSE else 0)
    assert sum(leaf.size for leaf in jax.tree.leaves(whole) if leaf.ndim > 2) == (36 if is_paged else 32) * cached
    graphdef, weights = nnx.split(layer)

    @jax.jit
    def step(weights, x, ctx):
        return nnx.merge(graphdef, weights)(x, ctx)

    cache, parts = whole.at(0), []
    for start, stop in ((0, 11), (11, 13), (13, 14)):
        ctx = make_context(positions=make_context().positions[:, start:stop], cache=cache, rows=rows)
        output = step(weights, x[:, start:stop], ctx)
        cache = output.cache
        parts.append(output.out_BTD)
        assert output.aux == {}
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=2e-5)
    assert [layer._is_absorbed(stop, ctx) for stop in (11, 10)] == [False, True]


@pytest.mark.slow
def test_indexer_is_trained_by_its_own_loss_only():
    layer, x = random_layer(make_model(**SPARSE)), inputs()
    graphdef, weights = nnx.split(layer)
    segments = jnp.asarray(np.array([[1] * 9 + [0] * 5, [0] * 2 + [1] * 5 + [2] * 7]))

    def losses(weights, x):
        output = nnx.merge(graphdef, weights)(x, make_context(segments=segments))
        return jnp.sum(jnp.square(output.out_BTD)), with_aux_losses(output.aux)["loss"]

    by_output, by_aux = jax.jit(jax.jacrev(losses, argnums=(0, 1)))(weights, x)
    for (grads, of_x), is_aux in ((by_output, False), (by_aux, True)):
        grads = nnx.to_pure_dict(grads)
        of_indexer = jax.tree.leaves(grads.pop("indexer"))
        learning, still = (of_indexer, [*jax.tree.leaves(grads), of_x])[:: 1 if is_aux else -1]
        assert all(np.all(np.isfinite(leaf)) for leaf in (*learning, *still))
        assert all(np.any(leaf) for leaf in learning)
        assert not any(np.any(leaf) for leaf in (still if is_aux else of_indexer))


@pytest.mark.slow
def test_padding_does_not_train_the_indexer_in_unpacked_rows():
    layer, x = random_layer(make_model(**SPARSE)), inputs()
    segments = jnp.asarray(np.array([[1] * 9 + [0] * 5, [1] * LENGTH]))
    expected = with_aux_losses(run(layer, x, make_context(segments=segments)).aux)["loss"]
    alone = make_context(positions=jnp.where(segments == 0, 0, make_context().positions))
    np.testing.assert_allclose(with_aux_losses(run(layer, x, alone).aux)["loss"], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.default_cases("adapter")
@pytest.mark.parametrize("cached", ["adapter", "int8"])
def test_adapters_and_int8_weights_apply_in_both_forms(cached):
    model, x = make_model(q_lora_rank=NARROW), inputs()
    if cached == "adapter":
        spec = LoraSpec(rank=2, scale=0.5, dropout=0.0, targets=(".*",), over_nf4=False)
        layer = random_layer(model, lora=spec)
        other = run(layer, x, make_context(is_adapted=False)).out_BTD
    else:
        layer = make_layer(model, formats=(QuantRule(QuantizationKind.int8_weights, (".*",)),))
        other = run(make_layer(model), x, make_context()).out_BTD
    expected = run(layer, x, make_context()).out_BTD
    assert np.abs(expected - other).max() > 1e-4
    ctx = make_context(cache=layer.empty_cache(DenseCacheSpec(BATCH, LENGTH), 1).at(0))
    first = run(layer, x[:, :-1], dataclasses.replace(ctx, positions=ctx.positions[:, :-1]))
    last = run(layer, x[:, -1:], dataclasses.replace(ctx, positions=ctx.positions[:, -1:], cache=first.cache))
    np.testing.assert_allclose(last.out_BTD, expected[:, -1:], atol=2e-5)


@pytest.mark.slow
def test_sharded_output_equals_one_device():
    layer, x = random_layer(make_model(**SPARSE)), inputs()
    sharder = Sharder(build_mesh(Mesh(fsdp=2, sequence=2, tensor=2), jax.devices()[:8]), RULES)
    segments = jnp.asarray(np.array([[1] * 9 + [0] * 5, [1] * 5 + [2] * 9]))
    expected = run(layer, x, make_context(segments=segments))
    found = run(layer, x, make_context(segments=segments, sharder=sharder))
    np.testing.assert_allclose(found.out_BTD, expected.out_BTD, atol=2e-5)
    np.testing.assert_allclose(with_aux_losses(found.aux)["loss"], with_aux_losses(expected.aux)["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.default_cases("ring-12", "ulysses-2")
@pytest.mark.parametrize(
    ("strategy", "latent"), [("ring", LATENT), ("ulysses", LATENT), ("ulysses", 2), ("all_gather", LATENT)]
)
def test_gradients_over_sharded_sequences_equal_one_device(strategy, latent):
    """Ulysses exchanges the heads of keys and values, or gathers latents if these are small."""
    layer, x = random_layer(make_model(q_lora_rank=NARROW, kv_lora_rank=latent)), inputs()
    mesh = build_mesh(Mesh(fsdp=2, sequence=2, tensor=2), jax.devices()[:8])
    segments = jnp.asarray(np.array([[1] * 9 + [0] * 5, [1] * 5 + [2] * 9]))
    graphdef, weights = nnx.split(layer)

    def gradients(sharder):
        ctx = make_context(segments=segments, sharder=sharder)
        loss = lambda weights, x: jnp.sum(nnx.merge(graphdef, weights)(x, ctx).out_BTD ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights, x)

    found, expected = (
        gradients(sharder) for sharder in (Sharder(mesh, RULES, MeshOptions(context=strategy)), Sharder.single())
    )
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_the_indexer_rejects_strategies_that_cannot_select_keys():
    layer = make_layer(make_model(**SPARSE))
    sharder = Sharder(build_mesh(Mesh(sequence=2), jax.devices()[:2]), RULES, MeshOptions(context="ring"))
    with pytest.raises(ConfigError, match=r"(?s)mesh.context.*sparse indexer.*accepted: auto, all_gather"):
        run(layer, inputs(), make_context(sharder=sharder))


@pytest.mark.slow
def test_unsupported_kernel_is_rejected_by_name():
    model = make_model(q_lora_rank=NARROW)
    model = dataclasses.replace(model, kernels=config.ModelKernels(attention=config.AttentionBackend.cudnn))
    with pytest.raises(ConfigError, match="takes values of the size of keys, not 5 and 10"):
        random_layer(model)(jnp.asarray(inputs()), make_context())


def test_contradictory_settings_are_rejected():
    requested = config.Mla(qk_rope_head_dim=7, mscale=1.0, indexer=config.Indexer(top_k=4, head_dim=4))
    problems = {problem.path: problem.reason for problem in requested.check()}
    assert set(problems) == {"qk_rope_head_dim", "mscale", "q_lora_rank", "indexer.head_dim"}
