"""Mixers with a state: dense and paged caches, packed rows, several devices, and the engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.compressed import CompressedAttention
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Request
from maxhydra.layers import Context, DenseCacheSpec, PagedCacheSpec, PageTable
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh

VOCAB = 48
SINGLE = Sharder.single()
DELTA = config.Delta(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=8)
SSM = config.Ssm(num_heads=4, head_dim=6, num_groups=2, state_dim=5)
COMPRESSED = CompressedAttention(
    q_lora_rank=6,
    window=4,
    rate=2,
    overlap=True,
    out_groups=2,
    out_rank=6,
    indexer=config.Indexer(top_k=3, num_heads=4, head_dim=8),
)
KINDS = {
    "convolution": config.Kind(mixer=config.Mixer.convolution, convolution=config.Convolution(bias=True)),
    "delta": config.Kind(mixer=config.Mixer.delta, delta=DELTA),
    "by_channel": config.Kind(
        mixer=config.Mixer.delta,
        delta=dataclasses.replace(DELTA, decay_rank=3, gate_rank=2, gate=config.DeltaGate.sigmoid),
    ),
    "compressed": config.Kind(mixer=config.Mixer.compressed, compressed=COMPRESSED),
    # A layer of one branch, followed by one of the other.
    "ssm": config.Kind(mixer=config.Mixer.ssm, ssm=SSM, feed_forward=config.FeedForward.none),
}


def make(mixer: str = "delta", **changes) -> ModelDef:
    full = config.Kind(norms=config.Norms.sandwich) if mixer == "convolution" else config.Kind()
    kinds = {"recurrent": KINDS[mixer], "full": full}
    sizes = {"num_layers": 4, "emb_dim": 16, "mlp_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    sizes |= {"vocab_size": VOCAB, "context_length": 64, "kinds": kinds, "pattern": ["recurrent", "full"]}
    return build(config.Model(**{**sizes, "dtypes": config.Dtypes(compute=config.Dtype.float32), **changes}))


def weights(model: ModelDef):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


def ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, shape).astype(np.int32)


def logits(model: ModelDef, params, tokens, *, segments=None, positions=None, sharder: Sharder = SINGLE) -> np.ndarray:
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions

    @jax.jit
    def run(params, tokens, positions, segments):
        ctx = Context(positions=positions, segments=segments, sharder=sharder, cache=None, dropout_key=None)
        return model.logits(params, model.hidden(params, tokens, ctx)[0], sharder)

    return np.asarray(run(params, tokens, positions, segments))


@pytest.mark.slow
@pytest.mark.default_cases("delta-paged")
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("mixer", KINDS)
def test_chunked_prefill_and_decode_equal_one_forward_pass(mixer, paged):
    """Rows of 13 and 9 tokens: chunks of 5 and 3, padded, then single tokens, in a cache with stale contents."""
    model = make(mixer)
    params, tokens, lengths = weights(model), ids(2, 13), np.array([13, 9])
    cache_spec = PagedCacheSpec(pages=11, page_size=4, slots=3, storage=None) if paged else DenseCacheSpec(2, 13)
    rows = PageTable(jnp.asarray([[7, 2, 9, 4], [1, 10, 0, 0]]), jnp.asarray([2, 0])) if paged else None

    @jax.jit
    def advance(params, cache, tokens, positions):
        ctx = Context(
            positions=positions,
            segments=(positions >= 0).astype(jnp.int32),
            sharder=SINGLE,
            cache=cache,
            dropout_key=None,
            rows=rows,
        )
        hidden, cache = model.hidden(params, tokens, ctx)
        return model.logits(params, hidden, SINGLE), cache

    cache = model.empty_cache(cache_spec)
    if paged:
        cache = jax.tree.map(lambda x: x + jnp.nan, cache)
    found = np.zeros((2, 13, VOCAB), np.float32)
    for start, stop in [(0, 5), (5, 8), *((i, i + 1) for i in range(8, 13))]:
        width = 5 if stop - start > 1 else 1
        places = start + np.arange(width)[None]
        positions = np.where((places < stop) & (places < lengths[:, None]), places, -1)
        part = np.take_along_axis(tokens, np.maximum(positions, 0), axis=1)
        new, cache = advance(params, cache, part, positions)
        found[:, start:stop] = new[:, : stop - start]
    expected = logits(model, params, tokens)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=1e-4)


@pytest.mark.slow
@pytest.mark.default_cases("compressed")
@pytest.mark.parametrize("mixer", KINDS)
def test_packed_documents_do_not_attend_to_each_other(mixer):
    model = make(mixer, num_layers=2)
    params, tokens = weights(model), ids(1, 20)
    segments = np.repeat([1, 2, 0], [7, 11, 2])[None]
    positions = np.concatenate([np.arange(7), np.arange(11), np.zeros(2, int)])[None]
    packed = logits(model, params, tokens, segments=segments, positions=positions)
    for start, stop in ((0, 7), (7, 18)):
        alone = logits(model, params, tokens[:, start:stop])
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=1e-4)


@pytest.mark.slow
@pytest.mark.default_cases("delta-axes0")
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2, "sequence": 2}, {"sequence": 8}])
@pytest.mark.parametrize("mixer", [name for name in KINDS if name != "compressed"])
def test_sharded_output_equals_one_device(mixer, axes):
    model = make(mixer)
    params, tokens = weights(model), ids(2, 16)
    sharder = Sharder(build_mesh(Mesh(**axes)), RULES)
    placed = jax.device_put(params, sharder.tree(model.axes))
    np.testing.assert_allclose(logits(model, placed, tokens, sharder=sharder), logits(model, params, tokens), atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("data", "prefill"), [(1, 0), (2, 0), (2, 1), (1, 2)])
@pytest.mark.parametrize("mixer", KINDS)
def test_engine_tokens_equal_repeated_forward_passes(mixer, data, prefill):
    """Three prompts share two slots with chunked prefill: the third reuses a slot that holds another's state.

    With `data` groups of devices, and with states copied from separate prefill devices.
    """
    model = make(mixer, num_layers=2, vocab_size=264)
    params = weights(model)
    sharder = Sharder(build_mesh(Mesh(data=data), jax.devices()[:data]), RULES)
    others = jax.devices()[data : data + prefill]
    prefill_sharder = Sharder(build_mesh(Mesh(fsdp=prefill), others), RULES) if prefill else None
    sizes = EngineConfig(max_batch=2, cache_tokens=256, page_size=8, prefill_chunk=12, deterministic=not prefill)
    placed = jax.device_put(params, sharder.tree(model.axes))
    meshes = {"sharder": sharder, "prefill_sharder": prefill_sharder}
    engine = Engine(model, placed, ByteTokenizer(), sizes, **meshes, eos=())
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    prompts = [tuple(ids(length).tolist()) for length in (20, 5, 20)]
    fields = {"max_tokens": 4, "stop": (), "ignore_eos": True, **greedy}
    answers = [handle.result() for handle in engine.submit_all([Request(prompt=p, **fields) for p in prompts])]
    assert not any(answer.error for answer in answers), answers
    assert engine.stats()["pages_kept"] == 0
    engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        row = np.zeros((1, 24), np.int32)
        row[0, : len(prompt) + 4] = (*prompt, *answer.tokens)
        likeliest = np.argmax(logits(model, params, row), axis=-1)[0]
        assert tuple(likeliest[len(prompt) - 1 : len(prompt) + 3]) == tuple(answer.tokens)


@pytest.mark.slow
def test_prompt_prefixes_are_not_cached_for_recurrent_layers():
    delta = ["model=tiny", "model.kinds.layer.mixer=delta"]
    assert compose(delta).config.model.is_recurrent
    assert not compose(["model=tiny"]).config.model.is_recurrent
    for task in ("decode", "serve", "grpo"):
        with pytest.raises(ConfigError, match=r"task\.engine\.prefix_cache.*whole sequence"):
            compose([f"task={task}", *delta, "task.engine.prefix_cache=true"])
