"""The engine gives every request the tokens it gets alone, rejects invalid requests, and leaks no state."""

import contextlib
import dataclasses
import functools
import math
import random
import re
import threading
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.decode import CacheDtype
from maxhydra.config.schema.decode import Engine as Config
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.health import Profile
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.detokenize import DeltaDetokenizer
from maxhydra.decode.draft_model import DraftModel
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import open_engine, split_devices
from maxhydra.decode.page_pool import Capacity, PagePool
from maxhydra.decode.request import Completion, Request, RequestRejectedError
from maxhydra.decode.step_functions import MultiStepKey
from maxhydra.decode.step_inputs import StepShape
from maxhydra.decode.steps import GREEDY as GREEDY_FEATURES
from maxhydra.decode.steps import CompiledSteps
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.runs.profile import profile_folders, summarize_profile
from maxhydra.runtime.profiler import Profiler
from maxhydra.sharding import Sharder, build_mesh
from tests.support.polling import wait_for

CONTEXT, EOS = 96, ByteTokenizer.eos
# Number of requests that are compared between engines.
COUNT = 20
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}


@functools.cache
def tiny() -> tuple[ModelDef, dict]:
    kinds = {"local": config.Kind(attention=config.Attention(window=7)), "global": config.Kind()}
    model = build(
        config.Model(
            num_layers=2,
            emb_dim=32,
            mlp_dim=48,
            num_heads=4,
            num_kv_heads=4,
            head_dim=8,
            vocab_size=264,
            context_length=CONTEXT,
            kinds=kinds,
            pattern=["local", "global"],
            dtypes=config.Dtypes(compute=config.Dtype.float32),
        )
    )
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


def start(
    axes=None, params=None, eos=(EOS,), profiler=None, prefill_axes=None, model=None, draft=None, **changes
) -> Engine:
    """`axes`: sizes of the mesh; `prefill_axes`: those of a mesh of further devices that prefill.

    `model`: another model with its `params`. `draft`: a draft model and its weights.
    """
    sizes = {"max_batch": 8, "cache_tokens": 2048, "page_size": 8, "max_context": None, "prefill_chunk": 32}
    model, plain = model or tiny()[0], tiny()[1]
    axes = axes or {}
    count = math.prod(axes.values())
    sharder = Sharder(build_mesh(Mesh(**axes), jax.devices()[:count]), RULES)
    prefill_sharder = None
    if prefill_axes is not None:
        others = jax.devices()[count:][: math.prod(prefill_axes.values())]
        prefill_sharder = Sharder(build_mesh(Mesh(**prefill_axes), others), RULES)
    placed = jax.device_put(plain if params is None else params, sharder.tree(model.axes))
    settings = Config(**{**sizes, **changes})
    meshes, draft_model = {"sharder": sharder, "prefill_sharder": prefill_sharder}, None
    if draft is not None:
        draft_model = DraftModel(draft[0], jax.device_put(draft[1], sharder.tree(draft[0].axes)))
    more = {"eos": eos, "profiler": profiler, "draft_model": draft_model}
    return Engine(model, placed, ByteTokenizer(), settings, **meshes, **more)


@pytest.mark.slow
def test_iterations_are_profiled_when_due_and_on_request(tmp_path) -> None:
    profiler = Profiler(Profile(steps=[2, 3], length=2), tmp_path)
    engine = start(profiler=profiler)
    try:
        engine.submit(make_request("profile me", max_tokens=8)).result()
        profiler.request()
        engine.submit(make_request("profile me", max_tokens=8)).result()
    finally:
        engine.close()
        profiler.close()
    first, second = profile_folders(tmp_path)
    assert first.name == "step_00002" and summarize_profile(first).steps == 2
    assert summarize_profile(second).steps == 2 and summarize_profile(second).devices == 1


def make_request(prompt, **changes) -> Request:
    fields = {"max_tokens": 12, "stop": (), "ignore_eos": False, **GREEDY, **changes}
    return Request(prompt=tuple(prompt.encode() if isinstance(prompt, str) else prompt), **fields)


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Engines with equal weights, cache and mesh share compiled programs. Which ones they use is their own choice."""
    programs: dict = {}

    def once(compile):
        def find(steps: CompiledSteps, key):
            arrays = jax.tree.leaves((steps._abstract_weights, steps.cache.abstract))
            kinds = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in arrays)
            place = (compile.__name__, key, steps._cache_spec, steps._drafting, kinds)
            if place not in programs:
                programs[place] = compile(steps, key)
            return programs[place]

        return find

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_compile_forward", "_compile_sample", "_compile_multi_step"):
            patch.setattr(CompiledSteps, name, once(getattr(CompiledSteps, name)))
        yield


@pytest.fixture(scope="module")
def engine():
    """One engine for the tests that only submit requests, so that programs are compiled once."""
    engine = start()
    yield engine
    engine.close()


@functools.cache
def logits_without_cache():
    model, params = tiny()

    @jax.jit
    def forward(ids):
        positions = jnp.arange(CONTEXT)[None]
        ctx = Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
        return model.logits(params, model.hidden(params, ids, ctx)[0], Sharder.single())[0]

    return forward


def greedy_without_cache(request: Request) -> list[int]:
    """The oracle: the argmax after a full forward pass over the sequence so far, for every token."""
    ids = list(request.prompt)
    while len(ids) < min(len(request.prompt) + request.max_tokens, CONTEXT):
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, : len(ids)] = ids
        ids.append(int(np.argmax(logits_without_cache()(row)[len(ids) - 1])))
        if ids[-1] == EOS and not request.ignore_eos:
            break
    return ids[len(request.prompt) :]


def varied_requests(count: int) -> list[Request]:
    """Prompts of 1 to 30 tokens, some with a common prefix; completions of 1 to 14; every third with a temperature.

    Sizes are rounded to powers of two, and each combination is a program, so twice as long ones take much longer.
    """
    rng = random.Random(1)
    common = [rng.randrange(256) for _ in range(24)]
    requests = []
    for index in range(count):
        unique = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        prompt = common[: rng.choice((8, 17, 24))] + unique[:6] if index % 4 == 3 else unique
        sampled = {"temperature": 0.8, "top_k": rng.choice((0, 40)), "top_p": 0.9, "seed": index}
        sampled |= {"min_p": 0.01, "repetition_penalty": 1.2}
        if index % 2:
            sampled |= {"frequency_penalty": 0.3, "presence_penalty": -0.2, "logit_bias": ((7, 2.5), (index, -3.0))}
        changes = sampled if index % 3 == 2 else {}
        requests.append(make_request(prompt, max_tokens=rng.randint(1, 14), ignore_eos=True, **changes))
    return requests


@functools.cache
def completed_alone() -> list[Completion]:
    """Complete each request alone, without prefix cache, with the prompt in one chunk."""
    engine = start(prefix_cache=False)
    completions = [engine.submit(request).result() for request in varied_requests(COUNT)]
    engine.close()
    return completions


@pytest.mark.slow
def test_alone_and_greedy_a_request_gets_the_tokens_of_the_oracle():
    for request, answer in zip(varied_requests(COUNT), completed_alone(), strict=True):
        if request.temperature == 0:
            assert list(answer.tokens) == greedy_without_cache(request)


ENGINES = {
    "one batch": {"max_batch": COUNT},
    "few slots and pages": {"max_batch": 5, "cache_tokens": 160},
    "short chunks, no prefix cache": {"prefill_chunk": 7, "prefix_cache": False},
    "four groups, few slots and pages": {"axes": {"fsdp": 4}, "max_batch": 8, "cache_tokens": 384},
    "separate prefill mesh, few slots and pages": {
        "axes": {"data": 2, "tensor": 2},
        "prefill_axes": {"fsdp": 2, "tensor": 2},
        "burst": 4,
        "max_batch": 6,
        "cache_tokens": 192,
    },
    "eight devices, multi-step": {
        "axes": {"data": 2, "fsdp": 2, "tensor": 2},
        "burst": 4,
        "deterministic": True,
        "max_batch": 4,
    },
}


@pytest.mark.slow
def test_multi_step_decoding_gives_the_tokens_of_single_steps():
    """Single steps run until the multi-step program is compiled, so submit until several tokens arrive together."""
    engine = start(burst=4)
    for _ in range(60):
        deltas = [list(handle) for handle in [engine.submit(request) for request in varied_requests(8)]]
        assert [Completion.from_deltas(each) for each in deltas] == completed_alone()[:8]
        if any(len(delta.tokens) > 1 for each in deltas for delta in each):
            break
    else:
        pytest.fail("no multi-step call was used")
    # The first token, a call of 4 steps, and 3 tokens of another call.
    request = make_request("a", max_tokens=8, ignore_eos=True)
    assert list(engine.submit(request).result().tokens) == greedy_without_cache(request)
    engine.close()


@pytest.mark.exhaustive
def test_nothing_is_compiled_after_the_warm_up():
    """A mixed load: all sampling features, prompts of one and several chunks, shared prefixes, changing batches."""
    engine = start(warm_up=True, burst=4, max_batch=4, prefill_chunk=16)
    try:
        before = engine.stats()["programs_compiled"]
        requests = [*varied_requests(8), make_request("a" * 70, temperature=0.7), make_request("a" * 70, logprobs=2)]
        requests += [make_request("b", temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=1)]
        completions = [handle.result() for handle in [engine.submit(request) for request in requests]]
        assert completions[:8] == completed_alone()[:8]
        assert {completion.finish for completion in completions} <= {"stop", "length"}
        assert engine.stats()["programs_compiled"] == before > 0
    finally:
        engine.close()


@pytest.mark.slow
def test_a_request_that_does_not_stream_gets_the_same_completion(engine):
    for request in (*varied_requests(6), make_request("ab", logprobs=1, max_tokens=5)):
        handle = engine.submit(dataclasses.replace(request, stream=False))
        deltas = list(handle)
        assert Completion.from_deltas(deltas) == engine.submit(request).result()
        assert len(deltas) == 1 or request.stop


def received(engine, request: Request) -> Completion:
    """The completion of a request whose receiver makes the text."""
    detokenizer, flushes = DeltaDetokenizer(ByteTokenizer(), request), []
    engine.add_flush(lambda: flushes.append(engine.stats()["running"]))
    deltas = list(engine.submit(dataclasses.replace(request, detokenize=False)))
    assert all(delta.is_detokenized == bool(request.stop) for delta in deltas)
    wait_for(lambda: len(flushes) >= len(deltas))
    return Completion.from_deltas([detokenizer.add(delta) for delta in deltas])


def test_the_receiver_can_make_the_text(engine):
    for request in (*varied_requests(4), make_request("ab", logprobs=1, max_tokens=5), make_request("a", stop=("b",))):
        completion = engine.submit(request).result()
        for stream in (False, True):
            assert received(engine, dataclasses.replace(request, stream=stream)) == completion


@pytest.mark.slow
@pytest.mark.default_cases("short chunks, no prefix cache")
@pytest.mark.parametrize("sizes", ENGINES)
def test_in_any_batch_a_request_gets_the_tokens_it_gets_alone(sizes):
    engine = start(**ENGINES[sizes])
    handles = [engine.submit(request) for request in varied_requests(COUNT)]
    completions = [handle.result() for handle in handles]
    stats = engine.stats()
    engine.close()
    assert completions == completed_alone()
    num_prompt_tokens = sum(len(request.prompt) for request in varied_requests(COUNT))
    assert (stats["prompt_tokens_read"] < num_prompt_tokens) == ("no prefix cache" not in sizes)
    assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0
    assert stats["tokens_written"] == sum(len(completion.tokens) for completion in completions)


@pytest.mark.slow
def test_groups_of_devices_hold_their_own_pages_which_never_move():
    """The KV cache is split over all devices, and no collective has an operand with a page."""
    engine = start({"data": 2, "fsdp": 2, "tensor": 2}, cache_tokens=8 * 4 * 13, cache_dtype=CacheDtype.int8)
    try:
        cache, programs = engine._runner._cache, engine._programs
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
        assert total == 8 * local
        shapes = StepShape(8, 1, 4, is_prefill=False), StepShape(4, 16, 4, is_prefill=True)
        keys = [(programs._compile_forward, shape) for shape in shapes]
        keys += [(programs._compile_multi_step, MultiStepKey(shapes[0], GREEDY_FEATURES, 2))]
        for compile, key in keys:
            text = compile(key).as_text()
            assert re.search(r"[\[,]13,", text), "the program has the pages of one group"
            collectives = re.findall(r"= (.*) (?:all-gather|all-reduce|all-to-all|collective-permute)\(.*", text)
            assert collectives and not [line for line in collectives if re.search(r"[\[,](13|52)[,\]]", line)]
    finally:
        engine.close()


def test_sequences_are_spread_over_groups_and_a_request_must_fit_into_one():
    capacity = Capacity(2, slots=3, pages=7, page_size=2, prefix_cache=True)
    assert (capacity.num_slots, capacity.num_pages) == (4, 8)
    prompt = [1, 2, 3, 4, 5]
    assert capacity.order_groups(prompt) == [0, 1]
    first = capacity.reserve(1, prompt, 6)
    capacity.publish(first, prompt, 5)
    assert (first.slot, capacity.order_groups(prompt), capacity.reserve(1, [9], 4)) == (2, [0, 1], None)
    capacity.release(first)
    assert capacity.order_groups(prompt) == [1, 0] and capacity.reserve(1, prompt, 6).lease.num_shared == 2
    assert capacity.order_groups([9]) == [0, 1]

    engine = start({"data": 2}, cache_tokens=80)
    assert engine.stats()["pages"] == 20, "each group has the pages of a sequence of max_context tokens, up to all"
    with pytest.raises(RequestRejectedError, match=r"holds 80 on each of the 2 groups of devices that share a batch"):
        engine.submit(make_request([1] * 10, max_tokens=80))
    engine.close()
    engine = start({"data": 2}, cache_tokens=80, max_context=40)
    assert engine.stats()["pages"] == 10
    engine.close()


@pytest.mark.slow
def test_separate_prefill_devices_do_not_delay_decoding():
    """While the weights of the prefill devices are being computed, a running sequence finishes; a cancelled one leaves
    no state. How long a sequence takes depends on the machine: longer delays follow one that ends too early."""
    engine = start(prefill_axes={})
    try:
        # Compiles all programs.
        engine.submit(make_request("a", max_tokens=40, ignore_eos=True)).result()
        assert any(decodes_during_prefill(engine, seconds) for seconds in (1, 4, 16, 64))
        engine.update_params(jax.tree.map(jnp.zeros_like, tiny()[1]))
        assert engine.submit(make_request("a", max_tokens=3, ignore_eos=True)).result().tokens == (0, 0, 0)
    finally:
        engine.close()


def decodes_during_prefill(engine, seconds):
    """Whether a running sequence finishes before the prefill of two others, whose weights are delayed by about this."""
    running = engine.submit(make_request("a", max_tokens=40, ignore_eos=True))
    next(iter(running))
    runner = engine._prefill_runner
    weights = runner._params
    leaves, tree = jax.tree.flatten(weights)
    delayed_leaf = delay_array(leaves[0], seconds=seconds)
    runner.set_params(jax.tree.unflatten(tree, [delayed_leaf, *leaves[1:]]))
    delayed, cancelled = (engine.submit(make_request(prompt, ignore_eos=True)) for prompt in ("bcd", "efghi"))
    wait_for(lambda: engine._scheduler.arriving or delayed_leaf.is_ready())
    cancelled.cancel()
    assert sum(len(delta.tokens) for delta in running) == 39
    is_first = not delayed_leaf.is_ready()
    assert list(delayed.result().tokens) == greedy_without_cache(make_request("bcd", ignore_eos=True))
    assert cancelled.result().finish == "cancelled" or not is_first
    wait_for(lambda: engine._scheduler.is_idle)
    assert engine.stats()["pages_used"] == runner.capacity.num_used == 0
    runner.set_params(weights)
    return is_first


@pytest.mark.slow
def test_prefill_devices_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"prefill_devices=8: leaves no device for decoding, of 8 in all\n.*1 to 7"):
        split_devices(Config(prefill_devices=8))
    decode, prefill = split_devices(Config(prefill_devices=3))
    assert (len(decode), len(prefill)) == (5, 3) and not {*decode} & {*prefill}
    assert split_devices(Config()) == (jax.devices(), [])
    with pytest.raises(ConfigError, match=r"task\.engine\.prefill_devices.*deterministic=true"):
        compose(["task=decode", "task.engine.prefill_devices=1", "task.engine.deterministic=true"])
    for task in (["task=grpo"], ["task=bench", "task.what=[decode]"]):
        with pytest.raises(ConfigError, match=r"task\.engine\.prefill_devices=1: is only supported by task=decode"):
            compose([*task, "task.engine.prefill_devices=1"])
    fitting = ["mesh.fsdp=2", "mesh.tensor=2", "task.engine.prefill_devices=2", "checkpoint.load_parameters=none"]
    whole = compose(["task=decode", *fitting]).config
    with pytest.raises(ConfigError, match=r"but there are 6 devices[\s\S]*the 2 devices that prefill and the 6 that"):
        open_engine(whole, whole.task.engine, None)


def delay_array(x: jax.Array, *, seconds: float) -> jax.Array:
    """The array, ready on its device after about this time."""

    @jax.jit
    def delay(x, steps):
        return x + jnp.where(jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y), 1.0) > 2, 1, 0)

    jax.block_until_ready(delay(x, 1))
    start = time.perf_counter()
    jax.block_until_ready(delay(x, 10**6))
    return delay(x, int(10**6 * seconds / (time.perf_counter() - start)))


@pytest.mark.slow
def test_a_repeated_prompt_is_not_prefilled_again(engine):
    prompt = [random.Random(2).randrange(256) for _ in range(61)]
    results = []
    for _ in range(2):
        before = engine.stats()["prompt_tokens_read"]
        results.append((engine.submit(make_request(prompt)).result(), engine.stats()["prompt_tokens_read"] - before))
    (first, num_first), (second, num_second) = results
    assert first == second
    assert (num_first, num_second) == (61, 61 - 56)


def test_samples_of_one_prompt_share_its_pages(engine):
    """Submitted together: the first prefills the whole prompt, the others only its last page."""
    prompt = [random.Random(3).randrange(256) for _ in range(50)]
    before = engine.stats()["prompt_tokens_read"]
    handles = [engine.submit(make_request(prompt, temperature=1.0, seed=seed)) for seed in range(4)]
    completions = [handle.result().tokens for handle in handles]
    assert len(set(completions)) == 4
    assert engine.stats()["prompt_tokens_read"] - before == 50 + 3 * 2


def test_a_seed_gives_the_same_tokens_again(engine):
    request = make_request("once upon a time", temperature=1.0, seed=2**63 + 5, ignore_eos=True)
    assert engine.submit(request).result() == engine.submit(request).result()
    assert (
        engine.submit(request).result()
        != engine.submit(make_request("once upon a time", temperature=1.0, seed=5)).result()
    )


@pytest.mark.slow
@pytest.mark.default_cases("4")
@pytest.mark.parametrize("burst", [1, 4])
def test_a_deterministic_engine_is_bit_reproducible(burst):
    """Independently of earlier requests, and of which programs are compiled."""
    several = [make_request(f"number {n}", temperature=1.0, seed=n, max_tokens=3 + n, logprobs=0) for n in range(6)]
    engine = start(deterministic=True, burst=burst)
    try:
        first = [handle.result() for handle in engine.submit_all(several)]
        for handle in engine.submit_all([make_request("a" * n, max_tokens=n) for n in (40, 3, 9)]):
            handle.result()
        engine.update_params(tiny()[1])
        assert [handle.result() for handle in engine.submit_all(several)] == first
        with pytest.raises(RequestRejectedError):
            engine.submit_all([make_request("a"), make_request("")])
        assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(CacheDtype.int8, 0.05), pytest.param(CacheDtype.float8, 0.4, marks=pytest.mark.exhaustive)],
)
def test_an_eight_bit_cache_is_close_to_the_exact_one(engine, kind, tolerance):
    request = make_request("some words to continue from, and a few", max_tokens=1, logprobs=20, ignore_eos=True)
    exact = dict(engine.submit(request).result().logprobs[0].alternatives)
    quantized = start(cache_dtype=kind, prefill_chunk=8)
    approximate = dict(quantized.submit(request).result().logprobs[0].alternatives)
    quantized.close()
    common = sorted(exact.keys() & approximate.keys())
    assert len(common) >= 14
    error = np.abs([exact[token] - approximate[token] for token in common]).max()
    assert 1e-6 < error < tolerance


@pytest.mark.slow
def test_logprobs_are_those_of_the_model(engine):
    request = make_request("abc", temperature=0.7, top_k=3, seed=4, logprobs=5, ignore_eos=True)
    completion = engine.submit(request).result()
    row = np.zeros((1, CONTEXT), np.int32)
    row[0, : 3 + 12] = [*request.prompt, *completion.tokens]
    expected = np.asarray(jax.nn.log_softmax(logits_without_cache()(row)))
    assert [entry.token for entry in completion.logprobs] == list(completion.tokens)
    for position, entry in enumerate(completion.logprobs, start=2):
        assert entry.logprob == pytest.approx(expected[position, entry.token], abs=1e-4)
        assert [token for token, _ in entry.alternatives] == list(np.argsort(-expected[position])[:5])
        assert entry.alternatives[0][1] == pytest.approx(expected[position].max(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"burst": 4, "deterministic": True}], ids=["single steps", "multi-step"])
def test_penalties_and_bias_equal_the_oracle(sizes):
    """Greedy: the argmax of the logits after bias and penalties, also in the slot of an earlier request."""
    engine = start(max_batch=2, **sizes)
    biased = {"logit_bias": ((5, 3.0), (200, -2.0)), "repetition_penalty": 1.5}
    settings = [biased, {}, {"frequency_penalty": 1.5, "presence_penalty": 0.8}, biased]
    requests = [make_request(f"pen{n}", ignore_eos=True, **each) for n, each in enumerate(settings)]
    completions = [handle.result() for handle in engine.submit_all(requests)]
    engine.close()
    for request, completion in zip(requests, completions, strict=True):
        row = np.zeros((1, CONTEXT), np.int32)
        ids = [*request.prompt, *completion.tokens]
        row[0, : len(ids)] = ids
        logits = np.asarray(logits_without_cache()(row))
        for position in range(len(request.prompt), len(ids)):
            scores, counts = (
                logits[position - 1].copy(),
                np.bincount(ids[len(request.prompt) : position], minlength=264),
            )
            for token, value in request.logit_bias:
                scores[token] += value
            seen = list(set(ids[:position]))
            factor = np.where(scores[seen] < 0, request.repetition_penalty, 1 / request.repetition_penalty)
            scores[seen] *= factor
            scores -= request.frequency_penalty * counts + request.presence_penalty * (counts > 0)
            assert ids[position] == int(np.argmax(scores))


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_the_model():
    """In several chunks, with and without a cached prefix, next to requests that do not ask for them."""
    engine = start(prefill_chunk=16)
    prompt = bytes(random.Random(3).randrange(256) for _ in range(50))
    scored = make_request(prompt, prompt_logprobs=3, logprobs=0, max_tokens=2)
    requests = [make_request(prompt, max_tokens=2), scored, dataclasses.replace(scored, stream=False)]
    engine.submit(requests[0]).result()
    plain, *completions = (handle.result() for handle in engine.submit_all(requests))
    engine.close()
    row = np.zeros((1, CONTEXT), np.int32)
    row[0, :50] = list(prompt)
    expected = np.asarray(jax.nn.log_softmax(logits_without_cache()(row)))
    assert plain.prompt_logprobs == ()
    for completion in completions:
        assert completion.tokens == plain.tokens and len(completion.prompt_logprobs) == 49
        for position, entry in enumerate(completion.prompt_logprobs):
            assert entry.token == prompt[position + 1]
            assert entry.logprob == pytest.approx(expected[position, entry.token], abs=1e-4)
            assert [token for token, _ in entry.alternatives] == list(np.argsort(-expected[position])[:3])


def ascii_only() -> dict:
    """Return weights that make only letters and spaces likely, so that characters and tokens correspond."""
    _, params = tiny()
    kernel = np.array(params["head"]["kernel"])
    likely = np.isin(np.arange(264), [32, *range(97, 123)])
    return {**params, "head": {"kernel": jnp.asarray(np.where(likely, 20 * kernel, 0))}}


@pytest.mark.slow
def test_stop_strings_and_eos_tokens_end_a_completion():
    engine = start(params=ascii_only())
    plain = engine.submit(make_request("go", max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)).result()
    assert plain.finish == "length" and len(plain.text) == len(plain.tokens) == 30
    text = plain.text
    for stop in ((text[10:13],), ("zzzzz", text[7:12]), (text[20:30],)):
        cut = engine.submit(
            make_request("go", max_tokens=30, temperature=1.0, seed=1, ignore_eos=True, stop=stop)
        ).result()
        end = min(text.find(part) + len(part) for part in stop if part in text)
        assert cut.finish == "stop" and len(cut.tokens) == end
        assert cut.text == text[: min(text.find(part) for part in stop if part in text)]
    deltas = list(engine.submit(make_request("go", max_tokens=30, temperature=1.0, seed=1, stop=(text[9:12] + "!",))))
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    engine.close()

    with_eos = start(params=ascii_only(), eos=[plain.tokens[4]])
    first = plain.tokens.index(plain.tokens[4])
    completion = with_eos.submit(make_request("go", max_tokens=30, temperature=1.0, seed=1)).result()
    assert (completion.finish, completion.tokens) == ("stop", plain.tokens[: first + 1])
    assert completion.text == text[:first]
    assert received(with_eos, make_request("go", max_tokens=30, temperature=1.0, seed=1)) == completion
    assert (
        with_eos.submit(make_request("go", max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)).result() == plain
    )
    with_eos.close()


def test_a_completion_ends_with_the_context(engine):
    completion = engine.submit(make_request([7] * 90, max_tokens=50, ignore_eos=True)).result()
    assert (len(completion.tokens), completion.finish) == (CONTEXT - 90, "length")


REJECTED = {
    "empty": (make_request(""), "the prompt is empty"),
    "prompt": (make_request([1] * 96), r"the prompt has 96 tokens.*at most 96.*task\.engine\.max_context"),
    "vocabulary": (make_request([264]), "vocabulary of 264"),
    "max_tokens": (make_request("a", max_tokens=0), "max_tokens=0 is not 1 or more"),
    "temperature": (make_request("a", temperature=-1.0), "temperature=-1.0"),
    "nan": (make_request("a", temperature=float("nan")), "temperature=nan"),
    "float32": (
        make_request("a", temperature=1e39, repetition_penalty=1e39),
        r"temperature=1e\+39.*; repetition_penalty=1",
    ),
    "top_p": (make_request("a", top_p=0.0), "top_p=0.0"),
    "min_p": (make_request("a", min_p=1.5), "min_p=1.5"),
    "seed": (make_request("a", seed=-1), "seed=-1"),
    "stop": (make_request("a", stop=("",)), "a list of non-empty strings"),
    "logprobs": (make_request("a", logprobs=21), "logprobs=21 is not 0 to 20"),
    "bias": (make_request("a", logit_bias=((264, 1.0),)), "logit_bias has a token outside"),
    "many biases": (make_request("a", logit_bias=((1, 1.0),) * 513), "at most 512"),
    "several": (make_request("a", top_k=-1, repetition_penalty=0.0), "top_k=-1.*; repetition_penalty=0.0"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_invalid_requests_are_rejected_at_once(engine, case):
    request, reason = REJECTED[case]
    with pytest.raises(RequestRejectedError, match=reason):
        engine.submit(request)


@pytest.mark.slow
def test_a_cache_that_is_too_small_is_named():
    engine = start(cache_tokens=40)
    with pytest.raises(RequestRejectedError, match=r"need 49 tokens.*holds 40: raise task\.engine\.cache_tokens"):
        engine.submit(make_request([1] * 10, max_tokens=40))
    assert len(engine.submit(make_request([1] * 10, max_tokens=31, ignore_eos=True)).result().tokens) == 31
    engine.close()


@pytest.mark.slow
def test_a_cancelled_sequence_frees_its_slot():
    engine = start(max_batch=1)
    first = engine.submit(make_request("a", max_tokens=90, ignore_eos=True))
    waiting, cancelled = (
        engine.submit(make_request("b", max_tokens=2, ignore_eos=True)),
        engine.submit(make_request("c")),
    )
    next(iter(first))
    cancelled.cancel()
    first.cancel()
    assert waiting.result().finish == "length"
    assert first.result().finish == cancelled.result().finish == "cancelled"
    engine.close()


def test_closing_cancels_running_sequences():
    engine = start()
    handles = [engine.submit(make_request("a", max_tokens=90, ignore_eos=True)) for _ in range(20)]
    next(iter(handles[0]))
    engine.close()
    assert {handle.result().finish for handle in handles} <= {"cancelled", "length"}
    with pytest.raises(RequestRejectedError, match="closed"):
        engine.submit(make_request("a"))


@pytest.mark.slow
def test_a_failure_reaches_every_handle():
    """Weights of a wrong shape make the next step fail: no handle waits forever, and new requests are rejected."""
    engine, wrong = start(max_batch=2), jax.tree.map(lambda x: np.zeros((*x.shape, 1)), tiny()[1])
    handles = [engine.submit(make_request("a", max_tokens=90, ignore_eos=True)) for _ in range(60)]
    next(iter(handles[0]))
    with contextlib.suppress(RequestRejectedError):
        engine.update_params(wrong)
    finished = [handle.result() for handle in handles[-3:]]
    assert {completion.finish for completion in finished} == {"error"}
    assert all("the engine failed" in completion.error for completion in finished)
    with pytest.raises(RequestRejectedError, match="the engine failed"):
        engine.submit(make_request("a"))
    engine.close()


def test_nan_logits_fail_the_request_and_not_the_engine():
    _, params = tiny()
    engine = start(params={**params, "final_norm": jax.tree.map(lambda x: x * jnp.nan, params["final_norm"])})
    completion = engine.submit(make_request("a")).result()
    assert completion.finish == "error" and "NaN or infinite" in completion.error
    engine.update_params(params)
    assert engine.submit(make_request("a", ignore_eos=True)).result().finish == "length"
    engine.close()


@pytest.mark.slow
def test_tokens_carry_the_version_of_the_weights_that_sampled_them():
    """A sequence continues under weights that arrive while it runs."""
    engine = start()
    request = make_request("a", max_tokens=90, ignore_eos=True, logprobs=0)
    before = engine.submit(request).result().logprobs
    negated = jax.block_until_ready(jax.tree.map(lambda x: -x, tiny()[1]))
    for _ in range(10):
        handle = engine.submit(request)
        deltas = [next(iter(handle))]
        engine.update_params(negated, version=7)
        logprobs = Completion.from_deltas([*deltas, *handle]).logprobs
        if logprobs[-1].version == 7:
            break
        # On a busy machine, the sequence may end before the weights arrive.
        engine.update_params(tiny()[1])
    switch = [token.version for token in logprobs].index(7)
    assert [token.version for token in logprobs] == [0] * switch + [7] * (90 - switch)
    assert logprobs[:switch] == before[:switch] and 0 < switch < 90
    assert [token.logprob for token in logprobs[switch:]] != [token.logprob for token in before[switch:]]
    engine.close()


@pytest.mark.slow
def test_new_weights_are_used_and_cached_prefixes_dropped():
    engine = start()
    request = make_request([random.Random(6).randrange(256) for _ in range(40)], ignore_eos=True)
    before = engine.submit(request).result()
    engine.update_params(jax.tree.map(lambda x: -x, tiny()[1]))
    after = engine.submit(request).result()
    assert engine.stats()["prompt_tokens_read"] == 80
    engine.update_params(tiny()[1])
    assert engine.submit(request).result() == before != after
    engine.close()


def count_items(node: object, seen: set[int]) -> int:
    """Count the items of all containers reachable from an object."""
    if id(node) in seen or isinstance(node, (jax.Array, np.ndarray, threading.Thread, type)):
        return 0
    seen.add(id(node))
    if isinstance(node, dict):
        return len(node) + sum(count_items(item, seen) for item in node.values())
    if isinstance(node, (list, tuple, set, deque)):
        return len(node) + sum(count_items(item, seen) for item in node)
    return count_items(vars(node), seen) if type(node).__module__.startswith("maxhydra.decode") else 0


def test_finished_requests_leave_no_state():
    """The containers of the engine do not grow with the number of requests, so steps do not become slower."""
    engine = start(prefix_cache=False, max_batch=2)
    sizes = []
    for _ in range(2):
        for count in (10, 30):
            handles = [engine.submit(make_request("abcd", max_tokens=3, ignore_eos=True)) for _ in range(count)]
            assert all(handle.result().finish == "length" for handle in handles)
        wait_for(lambda: engine._scheduler.is_idle and engine._emitter.is_idle)
        sizes.append(count_items(engine, set()))
    engine.close()
    assert sizes[0] == sizes[1]


def test_cached_pages_are_reused_until_they_are_evicted():
    pool = PagePool(6, 2, prefix_cache=True)
    first = pool.reserve([1, 2, 3, 4, 5], 8)
    assert (len(first.pages), first.num_shared, pool.num_used) == (4, 0, 4)
    pool.publish(first, [1, 2, 3, 4, 5], 5)
    sharing = pool.reserve([1, 2, 3, 4, 9], 6)
    assert sharing.pages[:2] == first.pages[:2] and sharing.num_shared == 2 and pool.num_used == 5
    assert pool.reserve([8], 4) is None and pool.num_used == 5
    pool.release(first)
    pool.release(sharing)
    assert (pool.num_used, pool.num_cached) == (0, 2)
    # The last token of a prompt is always computed, so its page is never shared.
    short = pool.reserve([1, 2, 3, 4], 4)
    assert short.num_shared == 1 and (pool.num_used, pool.num_cached) == (2, 1)
    # The end of a chain is evicted first; its beginning is in use here.
    large = pool.reserve([7], 8)
    assert len({*large.pages, *short.pages}) == 6 and (pool.num_used, pool.num_cached) == (6, 0)
    pool.release(large)
    assert pool.reserve([1, 2, 3, 4, 5], 6).num_shared == 1
    pool.clear_prefix_cache()
    assert pool.next_missing_key([1, 2, 3]) == (0, (1, 2)) and pool.num_cached == 0


def test_equal_tokens_after_different_prefixes_are_different_pages():
    pool = PagePool(8, 2, prefix_cache=True)
    lease = pool.reserve([1, 2, 5, 6, 7], 5)
    pool.publish(lease, [1, 2, 5, 6, 7], 5)
    assert pool.reserve([3, 4, 5, 6, 7], 5).num_shared == 0
    assert pool.reserve([5, 6, 7], 3).num_shared == 0
