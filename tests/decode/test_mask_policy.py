"""Tokens that grammars verify are those of masked sampling, and masks are used where too many are rejected."""

import dataclasses

import jax
import numpy as np
import pytest

from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode import draft_policy, mask_policy
from maxhydra.decode.adapters import AdapterLimits
from maxhydra.decode.engine import Engine
from maxhydra.decode.grammar import Constraint, Verification, json_grammar, regex_grammar
from maxhydra.decode.mask_policy import MaskPolicy
from maxhydra.decode.openai_server.metrics import format_metrics
from maxhydra.decode.request import Completion, Request
from maxhydra.decode.sequence import Sequence
from maxhydra.model import split_trainable
from maxhydra.sharding import Sharder, build_mesh
from tests.decode.test_engine import EOS, make_request, shared_programs, start, tiny
from tests.decode.test_speculation import check_equal
from tests.rl.test_router_replay import moe_model, random_weights
from tests.support.json_schemas import random_schema
from tests.support.polling import wait_for

pytest.importorskip("llguidance", reason="needs the extra serve")
__all__ = ["shared_programs"]
# A random model mostly samples tokens that these reject.
PATTERNS = (r"[\x00-\x7f]{0,60}", r"[^a]*a[^b]*b", "[ab]{5}c", r"[a-p]{3,9}[q-z]*", r"([0-9]{3}-){2}[a-f]+!")


def batches() -> list[list[Request]]:
    """Requests with grammars and without, which share few sampling features."""
    greedy = [
        make_request("more " * n, max_tokens=50, grammar=regex_grammar(each)) for n, each in enumerate(PATTERNS, 1)
    ]
    greedy += [make_request("free", max_tokens=40, ignore_eos=True)]
    random = [
        make_request(f"x{n}", max_tokens=60, temperature=1.0, seed=n, grammar=regex_grammar(each), logprobs=2)
        for n, each in enumerate([*PATTERNS, *PATTERNS])
    ]
    random += [make_request("free", max_tokens=40, temperature=0.8, seed=9, top_p=0.9, logit_bias=((7, 1.5),))]
    random[3] = dataclasses.replace(random[3], stream=False, logit_bias=((ord("c"), 2.0), (ord("q"), 3.0)))
    schemas = [
        make_request("{", max_tokens=70, temperature=1.0, seed=n, grammar=json_grammar(random_schema(n)))
        for n in range(6)
    ]
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
    monkeypatch.setattr(mask_policy, "MASKED_STEP", float("inf"))


ENGINES = {
    "multi-step": {"burst": 4},
    "few slots and pages": {"burst": 3, "max_batch": 4, "cache_tokens": 384, "prefill_chunk": 7},
    "two groups": {"axes": {"data": 2, "tensor": 2}, "burst": 2},
}
CASES = {**ENGINES, "chosen": {"burst": 8}}


@pytest.mark.exhaustive
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
    if case == "chosen":
        assert 0 < stats["grammar_tokens_accepted"] < stats["tokens_written"] / 4, stats
    else:
        assert min(stats["grammar_tokens_accepted"], stats["grammar_tokens_rejected"]) > 30, stats


@pytest.mark.exhaustive
@pytest.mark.usefixtures("never_masks")
def test_all_tokens_of_a_grammar_that_accepts_them_are_decoded_in_calls_of_several_steps() -> None:
    is_text = tuple((token, -1000.0) for token in range(128, 264))
    sampled = {"temperature": 1.0, "logit_bias": is_text, "logprobs": 0}
    free = [make_request("x", max_tokens=60, seed=seed, **sampled) for seed in range(4)]
    engine = start(burst=4, deterministic=True)
    try:
        expected = complete(engine, free)
        restricted = [dataclasses.replace(each, grammar=regex_grammar(r"[\x00-\x7f]*")) for each in free]
        check_equal(complete(engine, restricted), expected)
        stats = engine.stats()
        # The prefill samples the first token, with a mask.
        assert (stats["grammar_tokens_accepted"], stats["grammar_tokens_rejected"]) == (4 * 59, 0)
        # Masks in every step, since filters and penalties depend on them.
        for unsupported in ({"top_p": 0.9}, {"repetition_penalty": 1.1}):
            assert engine.submit(dataclasses.replace(restricted[0], **unsupported)).result().finish == "length"
        assert engine.stats()["grammar_tokens_accepted"] == 4 * 59
        metrics = format_metrics(engine.stats(), {}, {}, {}, model="tiny")
        assert "maxhydra_engine_grammar_tokens_accepted 236\n" in metrics
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("never_masks")
@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param({}, marks=pytest.mark.exhaustive, id="one mesh"),
        pytest.param({"axes": {"data": 1}, "prefill_axes": {"data": 1}}, id="prefill mesh"),
    ],
)
def test_completions_end_at_a_stop_string_eos_or_the_maximum_or_are_cancelled(meshes: dict) -> None:
    grammar, sampled = regex_grammar("([ab]{7}c){1,3}"), {"temperature": 1.0, "max_tokens": 40}
    whole_request = make_request("x", grammar=grammar, **sampled)
    plain = start()
    try:
        whole = plain.submit(whole_request).result()
    finally:
        plain.close()
    assert whole.finish == "stop" and whole.tokens[-1] == EOS
    engine = start(burst=4, **meshes)
    try:
        handles = [
            engine.submit(dataclasses.replace(whole_request, **each))
            for each in ({}, {"stop": (whole.text[2:5],)}, {"max_tokens": 5}, {"stream": False})
        ]
        endless = engine.submit(make_request("x", grammar=regex_grammar("a*"), max_tokens=90))
        next(iter(endless))
        endless.cancel()
        complete_one, stopped, full, silent = (handle.result() for handle in handles)
        assert complete_one == silent == whole and endless.result().finish in ("cancelled", "length")
        assert (stopped.text, stopped.tokens, stopped.finish) == (whole.text[:2], whole.tokens[:5], "stop")
        assert (full.text, full.tokens, full.finish) == (whole.text[:5], whole.tokens[:5], "length")
        wait_for(lambda: engine.stats()["running"] == 0)
        assert engine.stats()["pages_used"] == 0
        # Pages that hold tokens of restarted sequences are shared.
        again = make_request([*whole_request.prompt, *whole.tokens], max_tokens=20, ignore_eos=True)
        shared = engine.submit(again).result()
    finally:
        engine.close()
    plain = start(prefix_cache=False)
    try:
        assert plain.submit(again).result() == shared
    finally:
        plain.close()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("never_masks")
def test_experts_are_those_of_accepted_tokens() -> None:
    model = moe_model()
    weights = random_weights(model)
    requests = [
        make_request(
            f"x{seed}", max_tokens=24, temperature=1.0, seed=seed, grammar=regex_grammar("[a-m]{3}([^a-m][a-m]*){30}")
        )
        for seed in range(3)
    ]
    found = []
    for burst in (1, 4):
        settings = EngineConfig(max_batch=4, cache_tokens=512, page_size=8, burst=burst, deterministic=True)
        engine = Engine(
            model,
            weights,
            ByteTokenizer(),
            settings,
            sharder=Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES),
            eos=(EOS,),
            records_experts=True,
        )
        try:
            found.append(complete(engine, requests))
            num_rejected = engine.stats()["grammar_tokens_rejected"]
        finally:
            engine.close()
    assert num_rejected > 5
    for masked, verified in zip(*found, strict=True):
        assert masked.tokens == verified.tokens
        np.testing.assert_array_equal(masked.experts, verified.experts)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("never_masks")
def test_rows_that_restart_keep_their_adapters() -> None:
    model, params = tiny()
    limits, rng = AdapterLimits(slots=2, rank=2, targets=("attention/",)), np.random.default_rng(0)
    shapes = split_trainable(limits.model(model).shapes)[0]

    def weights(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        """Of one slot; stacked layers are before the axis of slots."""
        return rng.normal(size=np.delete(leaf.shape, int(path[0].key == "pattern"))).astype(np.float32)

    found = []
    adapters = {name: jax.tree_util.tree_map_with_path(weights, shapes) for name in ("one", "two")}
    requests = [
        make_request("more", max_tokens=30, adapter=name, grammar=regex_grammar(each))
        for each in PATTERNS[1:4]
        for name in (None, *adapters)
    ]
    sharder = Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES)
    for burst in (1, 4):
        settings = EngineConfig(max_batch=16, cache_tokens=2048, page_size=8, burst=burst, deterministic=True)
        engine = Engine(model, params, ByteTokenizer(), settings, sharder=sharder, eos=(EOS,), adapters=limits)
        try:
            for name, each in adapters.items():
                engine.load_adapter(name, "", each)
            found.append(complete(engine, requests))
            num_rejected = engine.stats()["grammar_tokens_rejected"]
        finally:
            engine.close()
    assert found[0] == found[1] and num_rejected > 20
    assert len({each.tokens for each in found[0][:3]}) == 3, "the adapters have no effect"


def make_policy(**changes: bool) -> MaskPolicy:
    return MaskPolicy(8, **{"vocab_size": 264, "is_supported": True, "is_deterministic": False, **changes})


class Decoding:
    """A batch that is decoded by a policy, and a clock that the calls advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_measured: bool, cost: float, rows: int = 4):
        """`cost`: of a step with masks relative to one without; a call without takes `overhead` in addition."""
        self.seconds = 0.0
        monkeypatch.setattr(draft_policy.time, "perf_counter", lambda: self.seconds)
        self.policy = make_policy(is_measured=is_measured)
        self.cost, self.overhead = cost, 0.1
        self.sequences = [Sequence(make_request([1], max_tokens=10**6), budget=10**6) for _ in range(rows)]
        for number, sequence in enumerate(self.sequences):
            sequence.number, sequence.constraint = number, Constraint(None, 0, np.zeros(1, np.uint32))

    def call(self, accepted: list[int]) -> int:
        """Dispatch a call whose grammars accept up to this many tokens of each row; return its number of steps."""
        num_steps = self.policy.choose_steps(self.sequences)
        on_arrival = self.policy.start(self.sequences, num_steps=num_steps)
        self.seconds += num_steps + self.overhead if num_steps else self.cost
        if on_arrival is not None:
            on_arrival()
        for sequence, most in zip(self.sequences, accepted if num_steps else (), strict=bool(num_steps)):
            count = min(most, num_steps)
            self.policy.record(sequence, Verification(count, is_rejected=count < num_steps))
        return num_steps


@pytest.mark.parametrize("is_measured", [False, True])
def test_calls_are_shorter_where_tokens_are_rejected(is_measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejection loses 1.5 K - 0.5 steps of calls with K steps, which take 0.1 steps longer than their steps."""
    decoding = Decoding(monkeypatch, is_measured=is_measured, cost=4.0)
    # 0: masks, whose cost is measured.
    assert {decoding.call([8] * 4) for _ in range(100)} - {0} == {2, 8} and decoding.call([8] * 4) == 8
    # One token in 48 is rejected: 1.05 * 1.05 and 1.0125 * 1.24 steps per token.
    for number in range(600):
        decoding.call([0 if (number + row) % 24 == 0 else 8 for row in range(4)])
    assert decoding.call([8] * 4) == 2


@pytest.mark.parametrize("is_measured", [False, True])
def test_masks_are_used_where_most_tokens_are_rejected(is_measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without masks are tried again now and then, which costs little."""
    decoding = Decoding(monkeypatch, is_measured=is_measured, cost=1.6)
    monkeypatch.setattr(mask_policy, "MASKED_STEP", 1.6)
    began = decoding.seconds
    calls = [decoding.call([0] * 4) for _ in range(3000)]
    assert calls[-1] == 0 and 10 < sum(calls[100:]) < 150
    assert decoding.seconds - began < 1.03 * 3000 * decoding.cost
    accepted = [decoding.call([8] * 4) for _ in range(1100)]
    assert all(accepted[1050:])


def test_a_sequence_whose_tokens_are_rejected_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the mean time per token of the batch is longer than with masks."""
    decoding = Decoding(monkeypatch, is_measured=False, cost=1.6, rows=16)
    monkeypatch.setattr(mask_policy, "MASKED_STEP", 1.6)
    assert all(decoding.call([0] + 15 * [8]) for _ in range(50))
    few = [decoding.call(12 * [0] + 4 * [8]) for _ in range(200)]
    assert few[0] and not any(few[150:])


def test_deterministic_choices_do_not_depend_on_earlier_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(monkeypatch, is_measured=False, cost=1.6)
    monkeypatch.setattr(mask_policy, "MASKED_STEP", 1.6)
    decoding.policy = make_policy(is_measured=False, is_deterministic=True)
    runs = []
    for first in (0, 4, 8):
        for number, sequence in enumerate(decoding.sequences, first):
            sequence.number = number
        runs.append([decoding.call([0] * 4) for _ in range(1500)])
    assert runs[0] == runs[1] == runs[2] and runs[0][0] > 0 and runs[0][-1] == 0


def test_masks_that_cost_little_are_used_where_tokens_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model hides the work of the host."""
    decoding = Decoding(monkeypatch, is_measured=True, cost=1.1)
    calls = [decoding.call([0] * 4) for _ in range(200)]
    assert not any(calls[40:]), "the cost is measured"
    decoding = Decoding(monkeypatch, is_measured=True, cost=4.0)
    calls = [decoding.call([0] * 4) for _ in range(200)]
    assert all(calls[40:]) and sum(not each for each in calls) == mask_policy.TRIAL_STEPS


def test_few_steps_are_chosen_where_their_logits_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(monkeypatch, is_measured=False, cost=4.0, rows=64)
    for vocab_size, num_steps in ((2**17, 8), (2**18, 2), (2**23, 2)):
        decoding.policy = MaskPolicy(
            8, vocab_size=vocab_size, is_supported=True, is_measured=False, is_deterministic=False
        )
        assert [decoding.call([8] * 64) for _ in range(60)][-1] == num_steps


def test_calls_that_were_slow_once_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(monkeypatch, is_measured=True, cost=2.0)
    decoding.overhead = 50.0
    assert [decoding.call([0] * 4) for _ in range(60)][-1] == 0
    decoding.overhead = 0.1
    assert [decoding.call([8] * 4) for _ in range(2000)][-1] == 8


def test_masks_that_were_slow_once_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may have compiled other programs meanwhile."""
    decoding = Decoding(monkeypatch, is_measured=True, cost=20.0)
    assert [decoding.call([0] * 4) for _ in range(100)][-1] > 0
    decoding.cost = 1.1
    assert [decoding.call([0] * 4) for _ in range(3000)][-1] == 0
