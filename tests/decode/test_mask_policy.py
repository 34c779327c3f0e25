"""Tokens that grammars verify are those of masked sampling, and masks are used where too many are rejected."""

import dataclasses

import numpy as np
import pytest

from maxhydra.decode import mask_policy
from maxhydra.decode.engine import Engine
from maxhydra.decode.grammar import json_grammar, regex_grammar
from maxhydra.decode.request import Completion, Request
from tests.decode.test_engine import make_request, shared_programs, start
from tests.decode.test_speculation import check_equal
from tests.support.json_schemas import random_schema

pytest.importorskip("llguidance", reason="needs the extra serve")
__all__ = ["shared_programs"]
# Of bytes: some are rejected by few of a random model's tokens, and some by most.
PATTERNS = (r"[\x00-\x7f]{0,60}", r"[^a]*a[^b]*b", "[ab]{5}c", r"[a-p]{3,9}[q-z]*", r"([0-9]{3}-){2}[a-f]+!")


def batches() -> list[list[Request]]:
    """Requests with grammars and without, which share few sampling features."""
    greedy = [make_request("more " * n, max_tokens=50, grammar=regex_grammar(each)) for n, each in enumerate(PATTERNS, 1)]
    greedy += [make_request("free", max_tokens=40, ignore_eos=True)]
    random = [
        make_request(f"x{n}", max_tokens=60, temperature=1.0, seed=n, grammar=regex_grammar(each), logprobs=2)
        for n, each in enumerate([*PATTERNS, *PATTERNS])
    ]
    random += [make_request("free", max_tokens=40, temperature=0.8, seed=9, top_p=0.9, logit_bias=((7, 1.5),))]
    random[3] = dataclasses.replace(random[3], stream=False, logit_bias=((ord("c"), 2.0), (ord("q"), 3.0)))
    schemas = [make_request("{", max_tokens=70, temperature=1.0, seed=n, grammar=json_grammar(random_schema(n))) for n in range(6)]
    return [greedy, random, schemas]


def complete(engine: Engine, requests: list[Request]) -> list[Completion]:
    return [handle.result() for handle in engine.submit_all(requests)]


@pytest.fixture(scope="module")
def masked_completions() -> list[list[Completion]]:
    """Of single steps with masks."""
    engine = start()
    try:
        completions = [complete(engine, batch) for batch in batches()]
        assert engine.stats()["grammar_tokens_accepted"] == engine.stats()["grammar_tokens_rejected"] == 0
        return completions
    finally:
        engine.close()


@pytest.fixture
def never_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars verify all tokens, however few they accept."""
    monkeypatch.setattr(mask_policy, "FIXED_COST", float("inf"))


ENGINES = {
    "multi-step": {"burst": 4},
    "few slots and pages": {"burst": 3, "max_batch": 4, "cache_tokens": 384, "prefill_chunk": 7},
    "two groups": {"axes": {"data": 2, "tensor": 2}, "burst": 2},
}
CASES = {**ENGINES, "chosen": {"burst": 8}}


@pytest.mark.slow
@pytest.mark.default_cases("multi-step")
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_masked_single_steps(
    case: str, masked_completions: list[list[Completion]], request: pytest.FixtureRequest
) -> None:
    if case != "chosen":
        request.getfixturevalue("never_masks")
    engine = start(**{"deterministic": True, **CASES[case]})
    try:
        for batch, expected in zip(batches(), masked_completions, strict=True):
            check_equal(complete(engine, batch), expected)
        stats = engine.stats()
    finally:
        engine.close()
    assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0
    assert stats["tokens_written"] == sum(len(each.tokens) for batch in masked_completions for each in batch)
    assert min(stats["grammar_tokens_accepted"], stats["grammar_tokens_rejected"]) > 30, stats
