"""Speculative decoding gives the completions of plain decoding, in fewer steps."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import Speculation, SpeculationMethod
from maxhydra.decode import draft_policy
from maxhydra.decode.drafting import UNKNOWN, Drafting, TokenHistory, draft_tokens
from maxhydra.decode.engine import Engine
from maxhydra.decode.openai_server.metrics import format_metrics
from maxhydra.decode.request import Completion, Request
from tests.decode.test_engine import CONTEXT, make_request, shared_programs, start, tiny

__all__ = ["shared_programs"]
CYCLE = 5
SPECULATION = Speculation(method=SpeculationMethod.ngram, tokens=3, max_ngram=2, min_ngram=1)


@functools.cache
def cyclic() -> dict:
    """Weights with which a token is mostly followed by one of the next two of its group of five.

    N-grams repeat, but not always.
    """
    _, params = tiny()
    table = 4 * params["embedding"]["table"]
    head, token = np.zeros(params["head"]["kernel"].shape, np.float32), np.arange(260)
    for step, factor in ((1, 0.6), (2, 0.56)):
        head[:, token // CYCLE * CYCLE + (token + step) % CYCLE] += factor * np.asarray(table)[:260].T
    final_norm = {"scale": jnp.ones_like(params["final_norm"]["scale"])}
    return {**params, "embedding": {"table": table}, "head": {"kernel": jnp.asarray(head)}, "final_norm": final_norm}


def speculative(**changes) -> Engine:
    return start(params=cyclic(), **{"speculation": SPECULATION, "deterministic": True, "max_batch": 2, **changes})


def sampled(seed: int, **changes) -> dict:
    return {"temperature": 1.0, "seed": seed, "ignore_eos": True, **changes}


def batches() -> list[list[Request]]:
    """Requests with the same sampling features per batch, so that few programs are compiled."""
    greedy = [
        make_request("to be or not to", max_tokens=23, ignore_eos=True),
        make_request([7], max_tokens=40, ignore_eos=True),
    ]
    greedy += [make_request("abcde" * 6, max_tokens=n, ignore_eos=True) for n in (1, 2, 6)]
    bias = {"logprobs": 2, "logit_bias": ((7, 1.5), (9, -3.0))}
    random = [make_request("more " * n, max_tokens=20 + n, **sampled(n, top_p=0.95, **bias)) for n in range(1, 4)]
    penalties = {"repetition_penalty": 1.05, "frequency_penalty": 0.2, "presence_penalty": -0.1}
    penalized = [make_request("more " * n, max_tokens=20 + n, **sampled(n, **penalties)) for n in range(1, 4)]
    return [greedy, random, penalized]


def complete(engine: Engine, requests: list[Request]) -> list[Completion]:
    return [handle.result() for handle in engine.submit_all(requests)]


@functools.cache
def plain_completions() -> list[list[Completion]]:
    engine = speculative(speculation=Speculation())
    try:
        return [complete(engine, batch) for batch in batches()]
    finally:
        engine.close()


def check_equal(found: list[Completion], expected: list[Completion]) -> None:
    """Log-probabilities differ by rounding."""
    for one, other in zip(found, expected, strict=True):
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
        assert [entry.token for entry in one.logprobs] == [entry.token for entry in other.logprobs]
        for found_entry, entry in zip(one.logprobs, other.logprobs, strict=True):
            pairs = [(found_entry.token, found_entry.logprob), *found_entry.alternatives]
            expected_pairs = [(entry.token, entry.logprob), *entry.alternatives]
            for (token, value), (expected_token, expected_value) in zip(pairs, expected_pairs, strict=True):
                assert token == expected_token and value == pytest.approx(expected_value, abs=1e-4)


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps verify drafts, whatever they gain."""
    monkeypatch.setattr(draft_policy, "MARGIN", 0.0)


# Settings of engines in which all steps verify drafts, and then also of others.
ENGINES: dict[str, dict[str, Any]] = {
    "single steps": {},
    "multi-step": {"burst": 3},
    "few pages": {"burst": 2, "max_batch": 4, "cache_tokens": 160, "prefill_chunk": 7},
    "two groups": {"axes": {"data": 2, "tensor": 2}, "burst": 2},
    "separate prefill mesh": {"deterministic": False, "prefill_axes": {"tensor": 2}},
}
CASES = {**ENGINES, "chosen single steps": {}, "chosen multi-step": {"burst": 3}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_plain_decoding(case: str, request: pytest.FixtureRequest) -> None:
    """Also if some calls have drafts and some do not."""
    is_chosen = case.startswith("chosen")
    if not is_chosen:
        request.getfixturevalue("always_drafts")
    engine = speculative(**CASES[case])
    try:
        for batch, expected in zip(batches(), plain_completions(), strict=True):
            check_equal(complete(engine, batch), expected)
        stats = engine.stats()
    finally:
        engine.close()
    assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0
    assert stats["tokens_written"] == sum(len(each.tokens) for batch in plain_completions() for each in batch)
    assert stats["tokens_accepted"] > 0, stats
    if is_chosen:
        assert 0 < stats["steps_speculative"] < stats["steps"], stats
    else:
        # Some drafts are accepted and some are not.
        assert 20 < stats["tokens_accepted"] < stats["tokens_drafted"] - 20, stats


@pytest.mark.slow
@pytest.mark.usefixtures("always_drafts")
def test_completions_end_within_the_accepted_tokens() -> None:
    """At a stop string, at an EOS token and at the end of the context."""
    request = make_request("abcde" * 4, max_tokens=30, ignore_eos=True)
    engine = speculative(max_batch=1)
    try:
        plain = engine.submit(request).result()
        text = plain.text
        assert len(text) == 30 and engine.stats()["tokens_accepted"] > 15
        stop = text[7:13]
        cut = engine.submit(dataclasses.replace(request, stop=(stop,))).result()
        assert (cut.finish, cut.text, len(cut.tokens)) == ("stop", text[: text.find(stop)], text.find(stop) + 6)
        longest = engine.submit(dataclasses.replace(request, max_tokens=500)).result()
        assert (longest.finish, len(longest.tokens)) == ("length", CONTEXT - 20)
        assert longest.tokens[:30] == plain.tokens
        stats = engine.stats()
        metrics = format_metrics(stats, {}, {}, {}, model="tiny")
        assert f"maxhydra_engine_steps_speculative {stats['steps_speculative']}\n" in metrics
        for name in ("draft", "accepted"):
            count = stats["tokens_accepted" if name == "accepted" else "tokens_drafted"]
            assert f'vllm:spec_decode_num_{name}_tokens_total{{model_name="tiny"}} {count}\n' in metrics
    finally:
        engine.close()
    ending = speculative(max_batch=1, eos=[plain.tokens[3]])
    try:
        completion = ending.submit(dataclasses.replace(request, ignore_eos=False)).result()
        first = plain.tokens.index(plain.tokens[3])
        assert (completion.finish, completion.tokens) == ("stop", plain.tokens[: first + 1])
    finally:
        ending.close()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("always_drafts")
def test_pages_that_speculative_steps_wrote_are_shared() -> None:
    """They hold no keys of rejected tokens."""
    first = make_request("to be or not to be", max_tokens=31, **sampled(3))
    engine, plain = speculative(), speculative(speculation=Speculation())
    try:
        completion = engine.submit(first).result()
        request = make_request([*first.prompt, *completion.tokens, 5], max_tokens=20, **sampled(4, logprobs=0))
        before = engine.stats()["prompt_tokens_read"]
        again = engine.submit(request).result()
        # Pages of 8 tokens; the last token of the first completion was never an input.
        assert engine.stats()["prompt_tokens_read"] - before == 50 - 48
        check_equal([again], [plain.submit(request).result()])
        assert 0 < engine.stats()["tokens_accepted"] < engine.stats()["tokens_drafted"]
    finally:
        engine.close()
        plain.close()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("always_drafts")
def test_a_batch_with_a_grammar_is_decoded_in_single_steps() -> None:
    """Its other sequences continue speculatively after it."""
    pytest.importorskip("llguidance", reason="needs the extra serve")
    from maxhydra.decode.grammar import regex_grammar

    free = make_request("abcde" * 3, max_tokens=60, ignore_eos=True)
    with_grammar = make_request("x", max_tokens=12, grammar=regex_grammar("[a-z]{6}"))
    engine, plain = speculative(), speculative(speculation=Speculation())
    try:
        expected = complete(plain, [free, with_grammar])
        handle = engine.submit(free)
        next(iter(handle))
        check_equal([engine.submit(with_grammar).result()], expected[1:])
        assert engine.submit(free).result() == expected[0]
        assert engine.stats()["tokens_accepted"] > 30
    finally:
        engine.close()
        plain.close()


def expected_draft(tokens: list[int], drafting: Drafting) -> list[int] | None:
    """The definition: the longest n-gram at the end, its latest earlier occurrence, and what follows it."""
    for size in range(min(drafting.max_ngram, len(tokens) - 1), drafting.min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                continued = list(tokens)
                for offset in range(drafting.tokens):
                    continued.append(continued[end + offset])
                return continued[len(tokens) :]
    return None


@pytest.mark.slow
def test_drafts_follow_the_latest_occurrence_of_the_longest_ngram() -> None:
    drafting, rng = Drafting(tokens=4, max_ngram=3, min_ngram=2, context=20), np.random.default_rng(0)
    lengths = rng.integers(1, 21, 200)
    rows = rng.integers(0, 3, (200, 20))
    history = TokenHistory(jnp.asarray(rows), jnp.asarray(lengths - 1), jnp.ones(200, jnp.int32))
    drafts, has_draft = map(np.asarray, draft_tokens(history, drafting))
    expected = [expected_draft(row[:length].tolist(), drafting) for row, length in zip(rows, lengths, strict=True)]
    assert 20 < sum(each is not None for each in expected) < 180
    for draft, is_found, each in zip(drafts.tolist(), has_draft, expected, strict=True):
        assert is_found == (each is not None)
        assert draft == (each or [UNKNOWN] * 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=qwen3-next-80b-a3b"], r"speculation\.method=ngram: is not supported with recurrent layers"),
        (["task.engine.speculation.min_ngram=4"], r"min_ngram=4: exceeds max_ngram=3"),
        (
            ["task.engine.speculation={method: null, tokens: 2}"],
            r"speculation\.tokens=2: has no effect with method=null",
        ),
    ],
)
def test_unsupported_settings_are_rejected(overrides: list[str], message: str) -> None:
    method = [] if "method" in overrides[0] else ["task.engine.speculation.method=ngram"]
    with pytest.raises(ConfigError, match=message):
        compose(["task=decode", "task.prompt=a", *method, *overrides])
