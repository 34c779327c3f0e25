"""Calls verify drafts where that generates more tokens per second."""

import itertools

import numpy as np
import pytest

from maxhydra.decode import draft_policy
from maxhydra.decode.draft_policy import AcceptancePolicy, CallTimes, DraftPolicy, DraftReplay
from maxhydra.decode.drafting import Drafting
from maxhydra.decode.sampler import SamplingFeatures
from maxhydra.decode.sequence import Sequence
from maxhydra.decode.step_functions import MultiStepKey
from maxhydra.decode.step_inputs import StepShape
from tests.decode.test_engine import make_request
from tests.decode.test_speculation import expected_draft

DRAFTING = Drafting(tokens=4, max_ngram=3, min_ngram=2, context=1000)
GREEDY = SamplingFeatures(random=False, filters=False, penalties=False, logprobs=False, alternatives=False)
NUM_STEPS = 8


def make_key(tokens: int) -> MultiStepKey:
    return MultiStepKey(StepShape(1, tokens, 8, is_prefill=False), GREEDY, NUM_STEPS)


PLAIN, SPECULATIVE = make_key(1), make_key(DRAFTING.step_tokens)


def expected_steps(tokens: list[int], start: int) -> list[int]:
    """Tokens that each speculative step generates, by the definition of drafts, as far as `tokens` decide it."""
    counts = []
    while True:
        draft = [*(expected_draft(tokens[: start + 1], DRAFTING) or []), None]
        following = tokens[start + 1 :]
        if len(following) < len(draft) and following == draft[: len(following)]:
            return counts
        counts.append(next(n for n, each in enumerate(draft) if n >= len(following) or following[n] != each) + 1)
        start += counts[-1]


def test_replayed_steps_are_those_that_drafts_give() -> None:
    """Whatever part of the tokens is known at a time."""
    rng, num_steps = np.random.default_rng(0), 0
    for part in range(1, 6):
        tokens, length = rng.integers(0, 3, 200).tolist(), int(rng.integers(1, 20))
        replay = DraftReplay(DRAFTING, tokens[:length])
        for known in [*range(length, 200, part), 200]:
            replay.update(tokens[:known])
        average, counts = 1.0, expected_steps(tokens, length)
        for number, count in enumerate(counts, draft_policy.PRIOR_STEPS + 1):
            average += (count - average) / min(number, draft_policy.AVERAGED_STEPS)
        assert replay.tokens_per_step == pytest.approx(average, rel=1e-9)
        num_steps += len(counts)
        assert 1 < np.mean(counts) < 3
    assert num_steps > 300


class Decoding:
    """A sequence that is decoded by a policy, and a clock that the calls advance."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_measured: bool,
        cost: float = 1.0,
        make: type[DraftPolicy] = DraftPolicy,
    ):
        """`cost`: of a speculative call relative to a plain one."""
        self.seconds = 0.0
        monkeypatch.setattr(draft_policy.time, "perf_counter", lambda: self.seconds)
        self.policy = make(DRAFTING, is_measured=is_measured)
        self.cost, self.sequence = cost, Sequence(make_request([1, 2, 3], max_tokens=10**6), budget=10**6)
        self.num_speculative = 0

    def call(self, tokens: list[int]) -> bool:
        """Decode some tokens in one call; return whether it verified drafts."""
        is_speculative = self.policy.is_worthwhile([self.sequence], make_key)
        on_arrival = self.policy.start(NUM_STEPS, is_speculative=is_speculative)
        self.seconds += self.cost if is_speculative else 1.0
        if on_arrival is not None:
            on_arrival()
        self.sequence.tokens += tokens
        self.sequence.num_computed += len(tokens)
        return is_speculative


@pytest.mark.parametrize("is_measured", [False, True])
def test_text_without_accepted_drafts_is_decoded_by_plain_steps(
    is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, rng = Decoding(monkeypatch, is_measured=is_measured, cost=1.2), np.random.default_rng(0)
    assert not any(decoding.call(rng.integers(0, 10**6, NUM_STEPS).tolist()) for _ in range(100))
    # All drafts are wrong: each occurrence of 1, 2 is followed by another token.
    numbers = itertools.count(10)
    wrong = [decoding.call([1, 2, next(numbers), 1, 2, next(numbers)]) for _ in range(100)]
    assert not any(wrong)
    assert decoding.policy.num_speculative_steps == 0 and decoding.policy.num_steps == 200 * NUM_STEPS
    # Then a text that repeats is decoded with drafts within a few calls, until it ends.
    repeated = [decoding.call([7] * NUM_STEPS) for _ in range(20)]
    assert not repeated[0] and all(repeated[4:])
    random = [decoding.call(rng.integers(0, 10**6, NUM_STEPS).tolist()) for _ in range(20)]
    assert random[0] and not any(random[4:])


@pytest.mark.parametrize(("cost", "least", "most"), [(1.3, 0.9, 1.0), (4.0, 0.001, 0.02)])
def test_measured_cost_decides(cost: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With about two tokens per step. Trials of a program that costs too much take 2 % of the time."""
    decoding, numbers = Decoding(monkeypatch, is_measured=True, cost=cost), itertools.count(10)
    calls = [decoding.call([1, 2, 3, next(numbers), 1, 2, 3, next(numbers)]) for _ in range(1000)]
    gain = decoding.policy._replays[decoding.sequence.number].tokens_per_step
    assert 1.2 < gain < 2.2
    assert least < np.mean(calls) < most


@pytest.mark.parametrize("is_measured", [False, True])
def test_measured_acceptance_decides(is_measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose drafts are never accepted costs at most 3 % of the time; a text with accepted ones is noticed."""
    cost = 2.8
    decoding = Decoding(monkeypatch, is_measured=is_measured, cost=cost, make=AcceptancePolicy)

    def call(accepted: int) -> bool:
        """A call of which this many of four drafts are accepted in every step."""
        is_speculative = decoding.call([0] * NUM_STEPS * (1 + accepted))
        if is_speculative:
            decoding.sequence.num_drafted += NUM_STEPS * DRAFTING.tokens
            decoding.sequence.num_accepted += NUM_STEPS * accepted
        return is_speculative

    wrong = [call(0) for _ in range(1000)]
    assert wrong[1] and 0.005 < np.mean(wrong) * (cost - 1) < 0.03
    right = [call(3) for _ in range(400)]
    assert not right[0] and all(right[250:])


def test_acceptance_of_earlier_requests_is_forgotten_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic=true, equal requests have equal calls, whatever was decoded before."""
    decoding = Decoding(monkeypatch, is_measured=False, make=AcceptancePolicy)

    def calls(number: int) -> list[bool]:
        """Decode a new sequence, whose drafts are all rejected."""
        decoding.sequence = Sequence(make_request([1, 2, 3], max_tokens=10**6), budget=10**6)
        decoding.sequence.number = number
        found = []
        for _ in range(100):
            found.append(decoding.call([0] * NUM_STEPS))
            decoding.sequence.num_drafted += found[-1] * NUM_STEPS * DRAFTING.tokens
        return found

    first = calls(0)
    assert first[0] and not all(first)
    assert calls(1) == first


def test_only_consecutive_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(draft_policy.time, "perf_counter", lambda: next(clock))
    times = CallTimes()
    for _ in range(2 * draft_policy.MIN_TIMES):
        times.interrupt()
        times.start(PLAIN)()
        times.start(SPECULATIVE)()
    assert times.ratio(SPECULATIVE, PLAIN) is None
    for _ in range(draft_policy.MAX_TIMES):
        times.start(PLAIN)()
        next(clock)
        times.start(SPECULATIVE)()
    assert times.ratio(PLAIN, SPECULATIVE) == pytest.approx(1 / 2)


def test_calls_that_wait_for_the_speculative_program_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Decoding(monkeypatch, is_measured=False, make=AcceptancePolicy).policy
    sequence = Sequence(make_request([1, 2, 3], max_tokens=100), budget=100)
    sequence.number = 0
    assert policy.is_worthwhile([sequence], make_key)
    policy.start(NUM_STEPS, is_speculative=False)
    assert policy.num_waiting_steps == NUM_STEPS
    # A batch with a grammar is decoded in single steps, for which nothing was chosen.
    policy.start(1, is_speculative=False)
    assert policy.is_worthwhile([sequence], make_key)
    policy.start(NUM_STEPS, is_speculative=True)
    assert policy.num_waiting_steps == NUM_STEPS
    assert policy.num_steps == 2 * NUM_STEPS + 1 and policy.num_speculative_steps == NUM_STEPS


def test_steps_with_masks_are_not_timed() -> None:
    """A batch with a grammar waits for its masks; the policy chooses nothing for it."""
    policy, sequence = AcceptancePolicy(DRAFTING, is_measured=True), Sequence(make_request([1], max_tokens=9), budget=9)
    sequence.number = 0
    policy.is_worthwhile([sequence], lambda tokens: make_key(tokens)._replace(num_steps=1))
    assert policy.start(1, is_speculative=False) is not None
    assert policy.start(1, is_speculative=False) is None
