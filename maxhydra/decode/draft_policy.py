"""Decides for each decode call whether its steps verify drafts or generate one token per row.

A step of T positions per row takes longer than a step of one, so it pays only if it generates enough tokens. How many
it would generate is known without running it: tokens are the same with and without drafts (speculation.py), so the host
replays drafting and verification over the tokens that it has read. Text without accepted drafts is therefore decoded by
plain steps alone. Drafts of the model's own layer or of a draft model cannot be replayed: the acceptance of the latest
speculative calls is used, and one is tried now and then. The cost of a step is measured, by the time between the tokens
of consecutive calls; calls that fill the cache of a draft model are not part of it.

Where the calls must be a function of the requests (deterministic=true, several processes), a fixed cost is used.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as List
from functools import partial

import numpy as np

from maxhydra.config.schema.decode import SpeculationMethod
from maxhydra.decode.drafting import Drafting
from maxhydra.decode.sequence import Sequence
from maxhydra.decode.step_functions import MultiStepKey

# Cost of each drafted token relative to a step of one token per row, unless it is measured. Between that of few rows on
# an accelerator, where a step takes the time of reading the weights, and 1, where compute is the limit. Drafts of a
# layer or a model read weights too: 4 of them by the layer of a 1B, or by a 1B for an 8B, make a step 2.75 and 3.0
# times as long on an H200 at batch 1.
FIXED_COST, MODEL_DRAFT_COST = 0.25, 0.45
# Tokens of the first sequence after which a choice is made again, if calls have fewer steps.
CHOICE_STEPS = 8
# By how much the expected tokens must exceed the cost, since both vary.
MARGIN = 1.1
# Replayed steps after which their weight in the average is 1 / e, and steps without accepted drafts that a new sequence
# is assumed to have had.
AVERAGED_STEPS, PRIOR_STEPS = 8, 3
# Timed calls per program: how many are required, and how many of the latest ones the median is taken of.
MIN_TIMES, MAX_TIMES = 3, 9
# Tokens per step from which on a speculative call may be tried although its cost seems too high: the measurement may be
# unrepresentative. What such trials lose is at most this part of the time, and once this many plain steps. Trials of a
# layer or a model also fill its cache.
TRIAL_GAIN, TRIAL_PART, FIRST_TRIAL_STEPS = 1.2, 0.02, 32
MODEL_TRIAL_PART = 0.01
# Drafted tokens after which their weight in the measured acceptance is one half.
MEASURED_DRAFTS = 64


class DraftReplay:
    """The tokens per step that speculative decoding of one sequence generates, over the tokens known so far."""

    def __init__(self, drafting: Drafting, prompt: List[int]):
        self._num_drafted = drafting.tokens
        sizes = range(drafting.max_ngram, drafting.min_ngram - 1, -1)
        self._last_ends = [(size, _last_ends(prompt, size)) for size in sizes]
        """From the longest size of n-grams: the position at which each n-gram ended last."""
        self._num_known = len(prompt)
        self._start = len(prompt)
        """Position of the input of the current step; the first token of the completion is sampled by the prefill."""
        self._found: int | None = None
        """Position of the earlier occurrence that the step's draft follows."""
        self._num_steps = PRIOR_STEPS
        self.tokens_per_step = 1.0
        """A moving average."""

    def update(self, tokens: List[int]) -> None:
        """Continue with the prompt and the completion so far."""
        for position in range(self._num_known, len(tokens)):
            is_start = position == self._start or tokens[position] != self._draft(tokens, position)
            if is_start:
                self._end_step(position)
            found = None
            for size, ends in self._last_ends:
                if position >= size - 1:
                    ngram = tuple(tokens[position - size + 1 : position + 1])
                    if is_start and found is None:
                        found = ends.get(ngram)
                    ends[ngram] = position
            if is_start:
                self._found = found
        self._num_known = len(tokens)

    def _draft(self, tokens: List[int], position: int) -> int | None:
        """The token that the current step drafts for a position."""
        offset = position - self._start - 1
        if self._found is None or offset >= self._num_drafted:
            return None
        # Behind the input of the step the draft repeats.
        return tokens[self._found + 1 + offset % (self._start - self._found)]

    def _end_step(self, position: int) -> None:
        """Start the next step at a position: the token there is the last that the current step generates."""
        if position > self._start:
            self._num_steps = min(self._num_steps + 1, AVERAGED_STEPS)
            self.tokens_per_step += (position - self._start - self.tokens_per_step) / self._num_steps
            self._start = position


def _last_ends(tokens: List[int], size: int) -> dict[tuple[int, ...], int]:
    """The last position at which each n-gram ends."""
    ngrams = zip(*(tokens[first:] for first in range(size)), strict=False)
    return {ngram: position for position, ngram in enumerate(ngrams, size - 1)}


class CallTimes:
    """Measured seconds per call of each program."""

    def __init__(self) -> None:
        self._seconds: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_TIMES))
        self._last_arrival = 0.0
        self._is_consecutive = False

    def interrupt(self) -> None:
        """Do not time the next call: other work was dispatched before it."""
        self._is_consecutive = False

    def start(self, key: Hashable) -> Callable[[], None]:
        """Return a function to call once the tokens of this call, which is dispatched next, have arrived."""
        is_consecutive, self._is_consecutive = self._is_consecutive, True
        return partial(self._finish, key, is_consecutive)

    def _finish(self, key: Hashable, is_consecutive: bool) -> None:
        now = time.perf_counter()
        if is_consecutive:
            # The device begins with a call when it has finished the one before.
            self._seconds[key].append(now - self._last_arrival)
        self._last_arrival = now

    def ratio(self, key: Hashable, other: Hashable) -> float | None:
        """Cost of a call relative to the other's; None before both were timed often enough."""
        seconds, others = self.seconds(key), self.seconds(other)
        return None if seconds is None or others is None else seconds / others

    def forget(self, key: Hashable) -> None:
        """Drop the times of a program."""
        self._seconds.pop(key, None)

    def seconds(self, key: Hashable) -> float | None:
        """Median seconds of a call; None before it was timed often enough."""
        times = self._seconds[key]
        return None if len(times) < MIN_TIMES else statistics.median(times)


class DraftPolicy:
    """Chooses between the speculative and the plain program for each call, and counts their steps."""

    fixed_cost, trial_part = FIXED_COST, TRIAL_PART
    """Cost of a drafted token where none is measured, and the part of the time that trials may lose."""

    def __init__(self, drafting: Drafting, *, is_measured: bool):
        """`is_measured`: costs are measured; otherwise choices are a function of the sequences."""
        self.drafting = drafting
        self._has_trials, self._trial_gain = is_measured, TRIAL_GAIN
        self._times = CallTimes() if is_measured else None
        self._replays: dict[int, DraftReplay] = {}
        """By the number of the sequence."""
        self._keys: tuple[MultiStepKey, MultiStepKey] | None = None
        """The programs of the last choice, plain and speculative."""
        self._chosen_at, self._is_worthwhile = (-1, 0), False
        """Number and computed tokens of the first sequence at the last choice."""
        self._trial_budget = float(FIRST_TRIAL_STEPS)
        """Plain steps' worth of time that trials may lose; negative after one that lost more."""
        self._choice: bool | None = None
        """Whether the next call should verify drafts; None if nothing was chosen for it, as for a batch with masks."""
        self.num_steps = self.num_speculative_steps = self.num_waiting_steps = 0
        """Decode steps so far, those of them that verified drafts, and those that did not because the program that
        verifies drafts was not compiled."""

    @property
    def counts(self) -> dict[str, int]:
        """Decode steps so far, as the statistics of the engine name them."""
        return {
            "steps": self.num_steps,
            "steps_speculative": self.num_speculative_steps,
            "steps_waiting": self.num_waiting_steps,
        }

    def interrupt(self) -> None:
        """Other work is dispatched before the next call."""
        if self._times is not None:
            self._times.interrupt()

    def start(self, num_steps: int, *, is_speculative: bool) -> Callable[[], None] | None:
        """Count a call, which is dispatched next; return a function to call once its tokens have arrived."""
        self.num_steps += num_steps
        self.num_speculative_steps += num_steps * is_speculative
        choice, self._choice = self._choice, None
        self.num_waiting_steps += num_steps * (choice is True and not is_speculative)
        if self._times is None:
            return None
        if choice is not None and self._keys is not None and self._keys[is_speculative].num_steps == num_steps:
            return self._times.start(self._keys[is_speculative])
        self._times.interrupt()
        return None

    def is_worthwhile(self, sequences: List[Sequence], make_key: Callable[[int], MultiStepKey]) -> bool:
        """Whether the next call should verify drafts. `make_key`: returns the program for this many tokens per step."""
        number, num_computed = sequences[0].number, sequences[0].num_computed
        if number != self._chosen_at[0] or num_computed >= self._chosen_at[1] + CHOICE_STEPS:
            self._chosen_at = number, num_computed
            self._keys = make_key(1), make_key(self.drafting.step_tokens)
            self._is_worthwhile = self._choose(self._expected_gain(sequences), *self._keys)
        self._choice = self._is_worthwhile
        return self._is_worthwhile

    def _choose(self, gain: float, plain: MultiStepKey, speculative: MultiStepKey) -> bool:
        """Whether the speculative program should generate more tokens per second, or is tried once again."""
        cost = None if self._times is None else self._times.ratio(speculative, plain)
        if cost is None:
            cost = 1 + self.fixed_cost * self.drafting.tokens
        if gain >= MARGIN * cost:
            return True
        num_steps = max(plain.num_steps, CHOICE_STEPS)
        if self._has_trials and gain >= self._trial_gain and self._trial_budget > 0:
            self._trial_budget -= max(cost - gain, 0) * num_steps
            return True
        if self._trial_budget <= 0:
            self._trial_budget += self.trial_part * num_steps
        return False

    def _expected_gain(self, sequences: List[Sequence]) -> float:
        """Tokens that a speculative step generates per row."""
        replays = {}
        for sequence in sequences:
            replay = self._replays.get(sequence.number) or DraftReplay(self.drafting, sequence.request.prompt)
            replay.update(sequence.tokens)
            replays[sequence.number] = replay
        self._replays = replays
        return statistics.fmean(replay.tokens_per_step for replay in replays.values())


class AcceptancePolicy(DraftPolicy):
    """Chooses by the measured acceptance of drafts, at first assuming that all are accepted."""

    fixed_cost, trial_part = MODEL_DRAFT_COST, MODEL_TRIAL_PART

    def __init__(self, drafting: Drafting, *, is_measured: bool):
        super().__init__(drafting, is_measured=is_measured)
        # Only trials show whether drafts are accepted again.
        self._has_trials, self._trial_gain, self._trial_budget = True, 0.0, 0.0
        self._num_drafted = self._num_accepted = 0.0
        """Weighted sums over the calls so far."""
        self._counts: dict[int, tuple[int, int]] = {}
        """Drafted and accepted tokens of each sequence at the last choice, by its number."""

    def _expected_gain(self, sequences: List[Sequence]) -> float:
        counts = {each.number: (each.num_drafted, each.num_accepted) for each in sequences}
        if self._times is None and self._counts.keys().isdisjoint(counts):
            # Choices are a function of the current requests, so nothing is known of new ones.
            self._trial_budget = self._num_drafted = self._num_accepted = 0.0
        new = [np.subtract(pair, self._counts.get(number, (0, 0))) for number, pair in counts.items()]
        drafted, accepted = np.sum(new, axis=0).tolist()
        # A trial that generated more tokens than expected has lost less, so that the next one follows sooner.
        gained = max(accepted - self._rate * drafted, 0) / len(sequences)
        self._trial_budget = min(self._trial_budget + gained, max(self._trial_budget, FIRST_TRIAL_STEPS))
        weight = MEASURED_DRAFTS / (MEASURED_DRAFTS + drafted)
        self._num_drafted = weight * self._num_drafted + drafted
        self._num_accepted = weight * self._num_accepted + accepted
        self._counts = counts
        return 1 + self.drafting.tokens * self._rate

    @property
    def _rate(self) -> float:
        """The part of the drafts that is accepted."""
        return self._num_accepted / self._num_drafted if self._num_drafted else 1.0


def make_policy(drafting: Drafting, *, is_measured: bool) -> DraftPolicy:
    """The policy of a drafting method; see DraftPolicy."""
    policy = DraftPolicy if drafting.method is SpeculationMethod.ngram else AcceptancePolicy
    return policy(drafting, is_measured=is_measured)
