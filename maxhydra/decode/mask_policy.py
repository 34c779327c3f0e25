"""Decides for each decode call whether grammars mask every token, or verify tokens that were sampled without masks.

A mask depends on all tokens before it, so that a step with masks waits for the host. A token that the mask allows is
the one that masked sampling gives, since both take the largest of the same perturbed logits (sampler.py). So calls of
several steps sample without masks, and the host verifies their tokens while the next call runs. Where a grammar rejects
a token, the row restarts after the last accepted one, with a mask in the first step of its next call. This loses the
rest of the call and the one that is in flight, so it pays only if grammars rarely reject a token: the acceptance of the
latest calls decides, compared with the measured cost of a step with masks. All such calls use a program that takes
masks for its first step, so that a rejection needs no other program.

Where the calls must be a function of the requests (deterministic=true, several processes), a fixed cost is used; with
deterministic=true, the acceptance of earlier sequences has no effect.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List

from maxhydra.config.schema.decode import Engine as Config
from maxhydra.config.schema.model import Model
from maxhydra.decode.draft_policy import CallTimes
from maxhydra.decode.grammar import Verification
from maxhydra.decode.sequence import Sequence

# Steps of a call whose tokens grammars verify. With K steps a rejection loses (K - 1) / 2 + K on average; a call should
# take longer than the host needs to verify the tokens of the one before.
VERIFIED_STEPS = 4
# Cost of a step with masks relative to a step of a call without, unless it is measured: a model of 1B takes 2.61 and
# 1.15 ms on an H200, at batch 32.
FIXED_COST = 2.0
# Steps after which their weight in the acceptance of a sequence, and of all sequences, is one half.
SEQUENCE_STEPS, ENGINE_STEPS = 64, 1024
# Steps that a sequence is assumed to have had, with the acceptance of all sequences: the fixed parts of a JSON object,
# with which it begins, are rejected more often than its strings.
PRIOR_STEPS = 32
# Steps with masks after which the acceptance counts as unknown and calls without masks are tried again: about 50
# steps, before it is known again, which lose about 2 % of the time.
MAX_MASKED_STEPS = 1024
# Steps per token from which on the cost of masks is measured, and for how many steps per size of the batch.
TRIAL_LOSS, TRIAL_STEPS = 1.25, 8


class Acceptance:
    """Weighted sums of the steps without masks, and of their tokens that the grammars accepted."""

    def __init__(self, averaged_steps: int, steps_per_token: float = 1.0):
        """`steps_per_token`: assumed at first."""
        self._averaged_steps = averaged_steps
        self._steps, self._tokens = float(PRIOR_STEPS), PRIOR_STEPS / steps_per_token

    def add(self, verification: Verification) -> None:
        weight = self._averaged_steps / (self._averaged_steps + verification.num_steps)
        self._steps = weight * self._steps + verification.num_steps
        self._tokens = weight * self._tokens + verification.num_accepted

    @property
    def steps_per_token(self) -> float:
        """1 if all tokens were accepted."""
        return self._steps / self._tokens


class MaskPolicy:
    """Chooses between calls with and without masks."""

    def __init__(self, multi_steps: int, *, is_supported: bool, is_measured: bool, is_deterministic: bool):
        """`multi_steps`: of a call without grammars. `is_supported`: whether sequences can restart after an earlier
        token. `is_measured`: the cost of masks is measured. `is_deterministic`: choices do not depend on sequences that
        were decoded before."""
        self.num_steps, self._is_supported = min(multi_steps, VERIFIED_STEPS), is_supported
        self._is_deterministic = is_deterministic
        self.is_masking = not is_supported
        """Whether the latest batch with grammars has masks in every step."""
        self._times = CallTimes() if is_measured else None
        self._all = Acceptance(ENGINE_STEPS)
        self._sequences: dict[int, Acceptance] = {}
        """By the number of the sequence."""
        self._num_masked = 0
        """Steps with masks since calls without were tried."""
        self._trial_steps: Counter[int] = Counter()
        """Steps with masks by size of the batch."""

    def interrupt(self) -> None:
        """Other work is dispatched before the next call."""
        if self._times is not None:
            self._times.interrupt()

    def start(self, sequences: List[Sequence], *, is_masked: bool) -> Callable[[], None] | None:
        """Return a function to call once the tokens of this call, which is dispatched next, have arrived."""
        if self._times is None or not self._is_supported:
            return None
        if not any(sequence.constraint is not None for sequence in sequences):
            self._times.interrupt()
            return None
        return self._times.start((_size(sequences), is_masked))

    def record(self, sequence: Sequence, verification: Verification) -> None:
        """Count the tokens of a call without masks."""
        if sequence.number in self._sequences:
            self._sequences[sequence.number].add(verification)
        self._all.add(verification)

    def verifies(self, sequences: List[Sequence]) -> bool:
        """Whether the next call should sample without masks; called once per call."""
        constrained = [sequence for sequence in sequences if sequence.constraint is not None]
        if constrained:
            self.is_masking = not self._chooses_verification(sequences, constrained)
        return not (constrained and self.is_masking)

    def _chooses_verification(self, sequences: List[Sequence], constrained: List[Sequence]) -> bool:
        if not self._is_supported or not all(sequence.is_verifiable for sequence in constrained):
            return False
        if self._num_masked >= MAX_MASKED_STEPS and not self._is_deterministic:
            self._all, self._sequences, self._num_masked = Acceptance(ENGINE_STEPS), {}, 0
        steps, size = self._expected_steps(sequences, constrained), _size(sequences)
        is_trial = self._times is not None and steps > TRIAL_LOSS and self._trial_steps[size] < TRIAL_STEPS
        if steps <= self._mask_cost(size) and not is_trial:
            return True
        self._num_masked += 1
        self._trial_steps[size] += 1
        return False

    def _expected_steps(self, sequences: List[Sequence], constrained: List[Sequence]) -> float:
        """Mean steps per token over the sequences, of which those without a grammar use every token."""
        known, prior = self._sequences, 1.0 if self._is_deterministic else self._all.steps_per_token
        self._sequences = {
            each.number: known.get(each.number) or Acceptance(SEQUENCE_STEPS, prior) for each in constrained
        }
        steps = sum(acceptance.steps_per_token for acceptance in self._sequences.values())
        return (len(sequences) - len(constrained) + steps) / len(sequences)

    def _mask_cost(self, size: int) -> float:
        """Cost of a step with masks relative to one of a call without."""
        ratio = None if self._times is None else self._times.ratio((size, True), (size, False))
        return FIXED_COST if ratio is None else self.num_steps * ratio


def make_mask_policy(config: Config, model: Model, multi_steps: int, *, is_measured: bool) -> MaskPolicy:
    """The policy of an engine; see MaskPolicy."""
    # A recurrent state cannot be reset to before a rejected token.
    is_supported = multi_steps > 1 and config.speculation.method is None and not model.is_recurrent
    return MaskPolicy(
        multi_steps, is_supported=is_supported, is_measured=is_measured, is_deterministic=config.deterministic
    )


def _size(sequences: List[Sequence]) -> int:
    """Sequences of the batch, rounded: batches of one size take about the same time per call."""
    return len(sequences).bit_length()
