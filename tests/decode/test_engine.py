"""The engine gives every request the tokens it gets alone, refuses what it cannot serve, and leaves nothing behind."""

import contextlib
import functools
import random
import threading
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema import model as config
from maxhydra.config.schema.decode import CacheDtype
from maxhydra.config.schema.decode import Engine as Config
from maxhydra.config.schema.mesh import RULES, Mesh
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.page_pool import PagePool
from maxhydra.decode.request import Completion, RefusedError, Request
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh

CONTEXT, EOS = 96, ByteTokenizer.eos
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}


@functools.cache
def tiny() -> tuple[ModelDef, dict]:
    kinds = {"local": config.Kind(attention=config.Attention(window=7)), "global": config.Kind()}
    model = build(
        config.Model(
            num_layers=3,
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


def start(devices: int = 1, params=None, eos=(EOS,), **changes) -> Engine:
    sizes = {"max_batch": 8, "cache_tokens": 1024, "page_size": 8, "max_context": None, "prefill_chunk": 32}
    model, plain = tiny()
    mesh = Mesh() if devices == 1 else Mesh(data=devices // 4, tensor=4)
    sharder = Sharder(build_mesh(mesh, jax.devices()[:devices]), RULES)
    placed = jax.device_put(plain if params is None else params, sharder.tree(model.axes))
    return Engine(model, placed, ByteTokenizer(), Config(**{**sizes, **changes}), sharder=sharder, eos=eos)


def ask(prompt, **changes) -> Request:
    fields = {"max_tokens": 12, "stop": (), "ignore_eos": False, **GREEDY, **changes}
    return Request(prompt=tuple(prompt.encode() if isinstance(prompt, str) else prompt), **fields)


@pytest.fixture(scope="module")
def engine():
    """One engine for the tests that only ask: programs are compiled once."""
    made = start()
    yield made
    made.close()


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
    """The oracle: the likeliest token after the whole sequence so far, computed anew every time."""
    ids = list(request.prompt)
    while len(ids) < min(len(request.prompt) + request.max_tokens, CONTEXT):
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, : len(ids)] = ids
        ids.append(int(np.argmax(logits_without_cache()(row)[len(ids) - 1])))
        if ids[-1] == EOS and not request.ignore_eos:
            break
    return ids[len(request.prompt) :]


def mixed(count: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, some with the same beginning; answers of 1 to 24; every third sampled."""
    rng = random.Random(1)
    common = [rng.randrange(256) for _ in range(40)]
    requests = []
    for index in range(count):
        own = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        prompt = common[: rng.choice((16, 25, 40))] + own[:20] if index % 4 == 3 else own
        sampled = {"temperature": 0.8, "top_k": rng.choice((0, 40)), "top_p": 0.9, "seed": index}
        sampled |= {"min_p": 0.01, "repetition_penalty": 1.2}
        changes = sampled if index % 3 == 2 else {}
        requests.append(ask(prompt, max_tokens=rng.randint(1, 24), ignore_eos=True, **changes))
    return requests


@functools.cache
def alone() -> list[Completion]:
    """Each request by itself in an engine that keeps nothing, prompt in one piece."""
    engine = start(max_batch=1, prefix_cache=False, prefill_chunk=64)
    answers = [engine.submit(request).result() for request in mixed(32)]
    engine.close()
    return answers


def test_alone_and_greedy_a_request_gets_what_the_model_says():
    for request, answer in zip(mixed(32), alone(), strict=True):
        if request.temperature == 0:
            assert list(answer.tokens) == greedy_without_cache(request)


COMPANIES = {
    "together": {"max_batch": 32, "cache_tokens": 4096},
    "few places and pages": {"max_batch": 5, "cache_tokens": 320},
    "short parts, nothing kept": {"prefill_chunk": 7, "prefix_cache": False},
    "eight devices": {"devices": 8, "max_batch": 16},
}


@pytest.mark.slow
def test_bursts_give_the_tokens_that_steps_give():
    """Single steps until the program of a burst is there: asked again until tokens come out together."""
    engine = start(burst=4)
    for _ in range(60):
        deltas = [list(handle) for handle in [engine.submit(request) for request in mixed(8)]]
        assert [Completion.of(own) for own in deltas] == alone()[:8]
        if any(len(delta.tokens) > 1 for own in deltas for delta in own):
            break
    else:
        pytest.fail("no burst was used")
    # The first token, a burst of 4, and 3 tokens: for these too another program stands in until it has its own.
    request, known = ask("a", max_tokens=8, ignore_eos=True), -1
    for _ in range(40):
        assert list(engine.submit(request).result().tokens) == greedy_without_cache(request)
        before, known = known, engine.settled()
        if known == before:
            break
    else:
        pytest.fail("the last burst did not become as long as the answer")
    engine.close()


@pytest.mark.parametrize("company", COMPANIES)
def test_in_any_company_a_request_gets_the_tokens_it_gets_alone(company):
    engine = start(**COMPANIES[company])
    handles = [engine.submit(request) for request in mixed(32)]
    answers = [handle.result() for handle in handles]
    stats = engine.stats()
    engine.close()
    assert answers == alone()
    whole = sum(len(request.prompt) for request in mixed(32))
    assert (stats["prompt_tokens_read"] < whole) == ("kept" not in company)
    assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0
    assert stats["tokens_written"] == sum(len(answer.tokens) for answer in answers)


def test_a_prompt_that_comes_again_is_not_read_again(engine):
    prompt = [random.Random(2).randrange(256) for _ in range(61)]
    read = []
    for _ in range(2):
        before = engine.stats()["prompt_tokens_read"]
        read.append((engine.submit(ask(prompt)).result(), engine.stats()["prompt_tokens_read"] - before))
    (first, whole), (second, rest) = read
    assert first == second
    assert (whole, rest) == (61, 61 - 56)


def test_samples_of_one_prompt_share_its_pages(engine):
    """All asked for at once: the prompt is read by the first, and its last page by each."""
    prompt = [random.Random(3).randrange(256) for _ in range(50)]
    before = engine.stats()["prompt_tokens_read"]
    handles = [engine.submit(ask(prompt, temperature=1.0, seed=seed)) for seed in range(4)]
    answers = [handle.result().tokens for handle in handles]
    assert len(set(answers)) == 4
    assert engine.stats()["prompt_tokens_read"] - before == 50 + 3 * 2


def test_a_seed_gives_the_same_tokens_again(engine):
    request = ask("once upon a time", temperature=1.0, seed=2**63 + 5, ignore_eos=True)
    assert engine.submit(request).result() == engine.submit(request).result()
    assert engine.submit(request).result() != engine.submit(ask("once upon a time", temperature=1.0, seed=5)).result()


def test_a_steady_engine_repeats_itself_to_the_last_bit():
    """Whatever was decoded before, and whichever programs are ready."""
    several = [ask(f"number {n}", temperature=1.0, seed=n, max_tokens=3 + n, logprobs=0) for n in range(6)]
    engine = start(steady=True)
    try:
        first = [handle.result() for handle in engine.submit_all(several)]
        for handle in engine.submit_all([ask("a" * n, max_tokens=n) for n in (40, 3, 9)]):
            handle.result()
        engine.update_params(tiny()[1])
        assert [handle.result() for handle in engine.submit_all(several)] == first
        with pytest.raises(RefusedError):
            engine.submit_all([ask("a"), ask("")])
        assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    finally:
        engine.close()


@pytest.mark.parametrize(("kind", "tolerance"), [(CacheDtype.int8, 0.05), (CacheDtype.float8, 0.4)])
def test_a_cache_of_eight_bits_stays_near(engine, kind, tolerance):
    request = ask("some words to go on from, and some more", max_tokens=1, logprobs=20, ignore_eos=True)
    exact = dict(engine.submit(request).result().logprobs[0].alternatives)
    narrow = start(cache_dtype=kind, prefill_chunk=8)
    near = dict(narrow.submit(request).result().logprobs[0].alternatives)
    narrow.close()
    common = sorted(exact.keys() & near.keys())
    assert len(common) >= 14
    error = np.abs([exact[token] - near[token] for token in common]).max()
    assert 1e-6 < error < tolerance


def test_logprobs_are_the_models(engine):
    request = ask("abc", temperature=0.7, top_k=3, seed=4, logprobs=5, ignore_eos=True)
    answer = engine.submit(request).result()
    row = np.zeros((1, CONTEXT), np.int32)
    row[0, : 3 + 12] = [*request.prompt, *answer.tokens]
    expected = np.asarray(jax.nn.log_softmax(logits_without_cache()(row)))
    assert [entry.token for entry in answer.logprobs] == list(answer.tokens)
    for place, entry in enumerate(answer.logprobs, start=2):
        assert entry.logprob == pytest.approx(expected[place, entry.token], abs=1e-4)
        assert [token for token, _ in entry.alternatives] == list(np.argsort(-expected[place])[:5])
        assert entry.alternatives[0][1] == pytest.approx(expected[place].max(), abs=1e-4)


def ascii_only() -> dict:
    """Weights under which only letters and spaces are likely, so that text and tokens correspond."""
    _, params = tiny()
    kernel = np.array(params["head"]["kernel"])
    likely = np.isin(np.arange(264), [32, *range(97, 123)])
    return {**params, "head": {"kernel": jnp.asarray(np.where(likely, 20 * kernel, 0))}}


def test_stop_texts_and_end_tokens_end_an_answer():
    engine = start(params=ascii_only())
    plain = engine.submit(ask("go", max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)).result()
    assert plain.finish == "length" and len(plain.text) == len(plain.tokens) == 30
    text = plain.text
    for stop in ((text[10:13],), ("zzzzz", text[7:12]), (text[20:30],)):
        cut = engine.submit(ask("go", max_tokens=30, temperature=1.0, seed=1, ignore_eos=True, stop=stop)).result()
        end = min(text.find(part) + len(part) for part in stop if part in text)
        assert cut.finish == "stop" and len(cut.tokens) == end
        assert cut.text == text[: min(text.find(part) for part in stop if part in text)]
    deltas = list(engine.submit(ask("go", max_tokens=30, temperature=1.0, seed=1, stop=(text[9:12] + "!",))))
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    engine.close()

    ending = start(params=ascii_only(), eos=[plain.tokens[4]])
    first = plain.tokens.index(plain.tokens[4])
    answer = ending.submit(ask("go", max_tokens=30, temperature=1.0, seed=1)).result()
    assert (answer.finish, answer.tokens) == ("stop", plain.tokens[: first + 1])
    assert answer.text == text[:first]
    assert ending.submit(ask("go", max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)).result() == plain
    ending.close()


def test_an_answer_ends_where_the_context_does(engine):
    answer = engine.submit(ask([7] * 90, max_tokens=50, ignore_eos=True)).result()
    assert (len(answer.tokens), answer.finish) == (CONTEXT - 90, "length")


REFUSED = {
    "empty": (ask(""), "the prompt is empty"),
    "prompt": (ask([1] * 96), r"the prompt has 96 tokens.*at most 96.*task\.engine\.max_context"),
    "vocabulary": (ask([264]), "vocabulary of 264"),
    "max_tokens": (ask("a", max_tokens=0), "max_tokens=0 is not 1 or more"),
    "temperature": (ask("a", temperature=-1.0), "temperature=-1.0"),
    "nan": (ask("a", temperature=float("nan")), "temperature=nan"),
    "float32": (ask("a", temperature=1e39, repetition_penalty=1e39), r"temperature=1e\+39.*; repetition_penalty=1"),
    "top_p": (ask("a", top_p=0.0), "top_p=0.0"),
    "min_p": (ask("a", min_p=1.5), "min_p=1.5"),
    "seed": (ask("a", seed=-1), "seed=-1"),
    "stop": (ask("a", stop=("",)), "not empty"),
    "logprobs": (ask("a", logprobs=21), "logprobs=21 is not 0 to 20"),
    "several": (ask("a", top_k=-1, repetition_penalty=0.0), "top_k=-1.*; repetition_penalty=0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_at_once(engine, case):
    request, reason = REFUSED[case]
    with pytest.raises(RefusedError, match=reason):
        engine.submit(request)


def test_a_cache_too_small_is_named():
    engine = start(cache_tokens=40)
    with pytest.raises(RefusedError, match=r"need 49 tokens.*holds 40: raise task\.engine\.cache_tokens"):
        engine.submit(ask([1] * 10, max_tokens=40))
    assert len(engine.submit(ask([1] * 10, max_tokens=31, ignore_eos=True)).result().tokens) == 31
    engine.close()


def test_a_sequence_that_is_given_up_makes_room():
    engine = start(max_batch=1)
    first = engine.submit(ask("a", max_tokens=90, ignore_eos=True))
    waiting, gone = engine.submit(ask("b", max_tokens=2, ignore_eos=True)), engine.submit(ask("c"))
    next(iter(first))
    gone.cancel()
    first.cancel()
    assert waiting.result().finish == "length"
    assert first.result().finish == gone.result().finish == "cancelled"
    engine.close()


def test_closing_ends_what_is_under_way():
    engine = start()
    handles = [engine.submit(ask("a", max_tokens=90, ignore_eos=True)) for _ in range(20)]
    next(iter(handles[0]))
    engine.close()
    assert {handle.result().finish for handle in handles} <= {"cancelled", "length"}
    with pytest.raises(RefusedError, match="closed"):
        engine.submit(ask("a"))


def test_a_failure_reaches_every_handle():
    """Weights of a wrong shape make the next step fail: nobody waits for ever, and nobody new is taken."""
    engine, wrong = start(max_batch=2), jax.tree.map(lambda x: np.zeros((*x.shape, 1)), tiny()[1])
    handles = [engine.submit(ask("a", max_tokens=90, ignore_eos=True)) for _ in range(60)]
    next(iter(handles[0]))
    with contextlib.suppress(RefusedError):
        engine.update_params(wrong)
    finished = [handle.result() for handle in handles[-3:]]
    assert {answer.finish for answer in finished} == {"error"}
    assert all("the engine failed" in answer.error for answer in finished)
    with pytest.raises(RefusedError, match="the engine failed"):
        engine.submit(ask("a"))
    engine.close()


def test_weights_that_give_no_numbers_fail_the_request_and_not_the_engine():
    _, params = tiny()
    engine = start(params={**params, "final_norm": jax.tree.map(lambda x: x * jnp.nan, params["final_norm"])})
    answer = engine.submit(ask("a")).result()
    assert answer.finish == "error" and "not numbers" in answer.error
    engine.update_params(params)
    assert engine.submit(ask("a", ignore_eos=True)).result().finish == "length"
    engine.close()


def test_new_weights_are_used_and_kept_beginnings_forgotten():
    engine = start()
    request = ask([random.Random(6).randrange(256) for _ in range(40)], ignore_eos=True)
    before = engine.submit(request).result()
    engine.update_params(jax.tree.map(lambda x: -x, tiny()[1]))
    after = engine.submit(request).result()
    assert engine.stats()["prompt_tokens_read"] == 80
    engine.update_params(tiny()[1])
    assert engine.submit(request).result() == before != after
    engine.close()


def held(node: object, seen: set[int]) -> int:
    """Items in all containers that can be reached from an object."""
    if id(node) in seen or isinstance(node, (jax.Array, np.ndarray, threading.Thread, type)):
        return 0
    seen.add(id(node))
    if isinstance(node, dict):
        return len(node) + sum(held(item, seen) for item in node.values())
    if isinstance(node, (list, tuple, set, deque)):
        return len(node) + sum(held(item, seen) for item in node)
    return held(vars(node), seen) if type(node).__module__.startswith("maxhydra.decode") else 0


def test_finished_requests_leave_nothing_behind():
    """Every container of the engine has as many items after 40 requests as after 10, so no step can take longer."""
    engine = start(prefix_cache=False, max_batch=2)
    sizes = []
    for _ in range(2):
        for count in (10, 30):
            handles = [engine.submit(ask("abcd", max_tokens=3, ignore_eos=True)) for _ in range(count)]
            assert all(handle.result().finish == "length" for handle in handles)
        with engine._news:
            engine._news.wait_for(lambda: engine._scheduler.is_idle and not engine._under_way, timeout=10)
            sizes.append(held(engine, set()))
    engine.close()
    assert sizes[0] == sizes[1]


def test_pages_are_found_again_until_they_are_needed():
    pool = PagePool(6, 2, remembers=True)
    first = pool.reserve([1, 2, 3, 4, 5], 8)
    assert (len(first.pages), first.shared, pool.used) == (4, 0, 4)
    pool.publish(first, [1, 2, 3, 4, 5], 5)
    sharing = pool.reserve([1, 2, 3, 4, 9], 6)
    assert sharing.pages[:2] == first.pages[:2] and sharing.shared == 2 and pool.used == 5
    assert pool.reserve([8], 4) is None and pool.used == 5
    pool.release(first)
    pool.release(sharing)
    assert (pool.used, pool.kept) == (0, 2)
    # The last token of a prompt is always computed, so its page is not looked for.
    short = pool.reserve([1, 2, 3, 4], 4)
    assert short.shared == 1 and (pool.used, pool.kept) == (2, 1)
    # The end of a chain is given up first; its beginning is in use here.
    large = pool.reserve([7], 8)
    assert len({*large.pages, *short.pages}) == 6 and (pool.used, pool.kept) == (6, 0)
    pool.release(large)
    assert pool.reserve([1, 2, 3, 4, 5], 6).shared == 1
    pool.forget()
    assert pool.next_key([1, 2, 3]) == (0, (1, 2)) and pool.kept == 0


def test_equal_texts_after_different_beginnings_are_different_pages():
    pool = PagePool(8, 2, remembers=True)
    lease = pool.reserve([1, 2, 5, 6, 7], 5)
    pool.publish(lease, [1, 2, 5, 6, 7], 5)
    assert pool.reserve([3, 4, 5, 6, 7], 5).shared == 0
    assert pool.reserve([5, 6, 7], 3).shared == 0
