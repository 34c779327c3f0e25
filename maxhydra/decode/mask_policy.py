"""Decides for each decode call whether grammars mask every token, or verify tokens that were sampled without masks.

A mask depends on all tokens before it, so that a step with masks waits for the host. A token that the mask allows is
the one that masked sampling gives, since both take the largest of the same perturbed logits (sampler.py). So calls
sample without masks, and the host verifies their tokens while the next call runs. The logits of such calls are kept
until they are verified: where a grammar rejects a token, it is sampled again from the same logits, with a mask, and the
row continues with it. The later steps of that call and of the one in flight are lost for this row: with K steps per
call, (K - 1) / 2 + K steps. Short calls lose less per rejection, and long ones cost the host less per
token. The rejections of the latest tokens and the measured time of calls decide.

Where the calls must be a function of the requests (deterministic=true, several processes), fixed times are used; with
deterministic=true, the rejections of earlier sequences have no effect.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List

from maxhydra.config.schema.decode import Engine as Config
from maxhydra.config.schema.model import Model
from maxhydra.decode.draft_policy import CallTimes
from maxhydra.decode.grammar import Verification
from maxhydra.decode.sequence import Sequence

# Steps per call whose tokens grammars verify: few where they reject many. Each number needs separate programs,
# and on an H200 calls of one step take 1.7 to 2.9 times as long per token as free ones, because they wait for the host.
STEP_COUNTS = (2, 8)
# Time of a step with masks, and overhead of a call without masks, relative to a step; unless they are measured. A model
# of 1B takes 2.92 ms and 1.00 ms for a step with and without masks on an H200 at batch 32, and a call 0.25 ms.
MASKED_STEP, CALL_OVERHEAD = 2.0, 0.25
# Tokens after which their weight in the rejections of a sequence, and of all sequences, is one half.
SEQUENCE_TOKENS, ENGINE_TOKENS = 64, 1024
# Assumed before the first tokens: the part of them that is rejected, and the number of tokens it was measured on.
FIRST_RATE, PRIOR_TOKENS = 0.02, 32
# Steps with masks after which the rejections count as unknown, and calls without masks are tried again.
MAX_MASKED_STEPS = 1024
# Steps per token from which on the cost of masks is measured, and for how many steps per size of the batch.
TRIAL_LOSS, TRIAL_STEPS = 1.1, 8
# Calls after which the time of others that were not used since counts as unknown: the machine may have been busy. Masks
# are measured again in TRIAL_STEPS steps, so less often.
MAX_AGE, MAX_MASKED_AGE = 256, 1024
# Elements of the logits that a call keeps, unless it has the least steps: half a GiB in float32.
MAX_LOGITS = 2**27


class RejectionRate:
    """The part of the tokens sampled without masks that grammars rejected, as a weighted average."""

    def __init__(self, averaged_tokens: int, rate: float = FIRST_RATE):
        """`rate`: assumed at first."""
        self._averaged_tokens = averaged_tokens
        self._tokens, self._rejected = float(PRIOR_TOKENS), PRIOR_TOKENS * rate

    def add(self, verification: Verification) -> None:
        count = verification.num_accepted + verification.is_rejected
        weight = self._averaged_tokens / (self._averaged_tokens + count)
        self._tokens = weight * self._tokens + count
        self._rejected = weight * self._rejected + verification.is_rejected

    @property
    def value(self) -> float:
        return self._rejected / self._tokens


class MaskPolicy:
    """Chooses the steps of the next call, and whether it has masks."""

    def __init__(
        self, multi_steps: int, *, vocab_size: int, is_supported: bool, is_measured: bool, is_deterministic: bool
    ):
        """`multi_steps`: of a call without grammars. `is_supported`: whether sequences can restart after an earlier
        token. `is_measured`: the cost of masks is measured. `is_deterministic`: choices do not depend on sequences that
        were decoded before."""
        self._multi_steps, self._vocab_size, self._is_supported = multi_steps, vocab_size, is_supported
        self.step_counts = sorted({min(count, multi_steps) for count in STEP_COUNTS}) if is_supported else []
        """Of calls whose tokens grammars verify."""
        self._is_deterministic = is_deterministic
        self.is_masking = not is_supported
        """Whether the latest batch with grammars has masks in every step."""
        self._times = CallTimes() if is_measured else None
        self._all = RejectionRate(ENGINE_TOKENS)
        self._sequences: dict[int, RejectionRate] = {}
        """By the number of the sequence."""
        self._num_masked = 0
        """Steps with masks since calls without were tried."""
        self._trial_steps: Counter[int] = Counter()
        """Steps with masks by size of the batch."""
        self._num_calls, self._last_calls = 0, dict[tuple[int, int], int]()
        """Number of calls so far, and at the last one with each size of the batch and number of steps."""

    def interrupt(self) -> None:
        """Other work is dispatched before the next call."""
        if self._times is not None:
            self._times.interrupt()

    def start(self, sequences: List[Sequence], *, num_steps: int) -> Callable[[], None] | None:
        """Return a function to call once the tokens of this call, which is dispatched next, have arrived.

        `num_steps`: 0 of a step with masks.
        """
        if self._times is None or not self._is_supported:
            return None
        if not any(sequence.constraint is not None for sequence in sequences):
            self._times.interrupt()
            return None
        self._num_calls += 1
        self._last_calls[_size(sequences), num_steps] = self._num_calls
        return self._times.start((_size(sequences), num_steps))

    def record(self, sequence: Sequence, verification: Verification) -> None:
        """Count the tokens of a call without masks."""
        if sequence.number in self._sequences:
            self._sequences[sequence.number].add(verification)
        self._all.add(verification)

    def choose_steps(self, sequences: List[Sequence]) -> int:
        """Steps of the next call; 0 of a step with masks. Called once per call."""
        constrained = [sequence for sequence in sequences if sequence.constraint is not None]
        if not constrained:
            return self._multi_steps
        num_steps = self._choose_verified_steps(sequences, constrained)
        self.is_masking = num_steps == 0
        return num_steps

    def fits_logits(self, rows: int, num_steps: int) -> bool:
        """Whether the logits of a call are few enough to keep them, or it has the least steps."""
        return num_steps == self.step_counts[0] or rows * num_steps * self._vocab_size <= MAX_LOGITS

    def _choose_verified_steps(self, sequences: List[Sequence], constrained: List[Sequence]) -> int:
        if not self._is_supported or not all(sequence.is_verifiable for sequence in constrained):
            return 0
        if self._num_masked >= MAX_MASKED_STEPS and not self._is_deterministic:
            self._all, self._sequences, self._num_masked = RejectionRate(ENGINE_TOKENS), {}, 0
        rate, size = self._expected_rate(sequences, constrained), _size(sequences)
        counts = [count for count in self.step_counts if self.fits_logits(1 << size, count)]
        seconds = self._step_seconds(size)
        best = min(counts, key=lambda count: seconds[count] * _steps_per_token(count, rate))
        loss = _steps_per_token(best, rate)
        is_trial = self._times is not None and loss > TRIAL_LOSS and self._trial_steps[size] < TRIAL_STEPS
        if seconds[best] * loss <= seconds[0] and not is_trial:
            return best
        self._num_masked += 1
        self._trial_steps[size] += 1
        return 0

    def _expected_rate(self, sequences: List[Sequence], constrained: List[Sequence]) -> float:
        """Mean part of rejected tokens over the sequences; of those without a grammar, no token is rejected."""
        known, prior = self._sequences, FIRST_RATE if self._is_deterministic else self._all.value
        self._sequences = {
            each.number: known.get(each.number) or RejectionRate(SEQUENCE_TOKENS, prior) for each in constrained
        }
        return sum(rate.value for rate in self._sequences.values()) / len(sequences)

    def _step_seconds(self, size: int) -> dict[int, float]:
        """Seconds per step of calls with each number of steps, or in any unit if none is measured; 0: with masks."""
        assumed = {0: MASKED_STEP} | {count: 1 + CALL_OVERHEAD / count for count in self.step_counts}
        if self._times is None:
            return assumed
        for count in assumed:
            age = self._num_calls - self._last_calls.get((size, count), self._num_calls)
            if age > (MAX_AGE if count else MAX_MASKED_AGE):
                self._times.forget((size, count))
                if count == 0:
                    self._trial_steps[size] = 0
        calls = {count: self._times.seconds((size, count)) for count in assumed}
        measured = {count: seconds / max(count, 1) for count, seconds in calls.items() if seconds is not None}
        unit = min((seconds / assumed[count] for count, seconds in measured.items()), default=1.0)
        found = {count: unit * seconds for count, seconds in assumed.items()} | measured
        # Longer calls, and those without masks, take no longer per step, unless the machine was busy when measured.
        return dict(zip(found, itertools.accumulate(found.values(), min), strict=True))


def make_mask_policy(config: Config, model: Model, multi_steps: int, *, is_measured: bool) -> MaskPolicy:
    """The policy of an engine; see MaskPolicy."""
    # A recurrent state cannot be reset to before a rejected token.
    is_supported = multi_steps > 1 and config.speculation.method is None and not model.is_recurrent
    return MaskPolicy(
        multi_steps,
        vocab_size=model.vocab_size,
        is_supported=is_supported,
        is_measured=is_measured,
        is_deterministic=config.deterministic,
    )


def _steps_per_token(num_steps: int, rate: float) -> float:
    """Steps per token if this part of the tokens is rejected."""
    return 1 + rate * ((num_steps - 1) / 2 + num_steps)


def _size(sequences: List[Sequence]) -> int:
    """Sequences of the batch, rounded: batches of one size take about the same time per call."""
    return len(sequences).bit_length()
