"""How settings and a prompt become requests: for the terminal, files, the server and reinforcement learning alike."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.config.errors import did_you_mean
from maxhydra.config.fields import FieldType, fields
from maxhydra.config.schema.decode import Sampling
from maxhydra.decode.request import Request

# Seeds that every integer type on every device can hold.
SEEDS = 2**31
# Longer ones would have the engine hold back more text than anyone waits for.
LONGEST_STOP, MOST_STOPS = 1000, 64


class SettingError(ValueError):
    """A setting of one prompt that cannot be used: which, why, and what is accepted."""

    def __init__(self, name: str, reason: str, accepted: str = ""):
        self.name, self.reason, self.accepted = name, reason, accepted
        super().__init__(f"{name} {reason}" + (f"; accepted: {accepted}" if accepted else ""))


def adjusted(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """The settings with some of them replaced by what came as JSON; SettingError names the first that does not fit."""
    known = fields(Sampling)
    for name, value in changes.items():
        if name not in known:
            raise SettingError(name, "is no setting of sampling", did_you_mean(name, known) or ", ".join(known))
        spec = known[name].spec
        if reason := _mismatch(spec, value):
            raise SettingError(name, reason, spec.accepted)
    changed = dataclasses.replace(sampling, **changes)
    if "" in changed.stop:
        raise SettingError("stop", "holds an empty text", "texts of a character or more")
    if len(changed.stop) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in changed.stop):
        raise SettingError("stop", "is too long", f"at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters")
    return changed


def make_requests(
    prompt: Sequence[int], sampling: Sampling, *, samples: int, seed: int, number: int, logprobs: int | None
) -> list[Request]:
    """A request for each sample of a prompt.

    The seed of the settings is that of the first sample, and the next ones follow it. Without one, it is drawn from the
    run's `seed` and the `number` of the prompt, so that a prompt is answered alike whatever else is asked, in whatever
    order, and however often the run was interrupted.
    """
    first = drawn_seed(seed, number) if sampling.seed is None else sampling.seed
    return [
        Request(
            prompt=tuple(prompt),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=(first + sample) % SEEDS,
            stop=tuple(sampling.stop),
            ignore_eos=sampling.ignore_eos,
            logprobs=logprobs,
        )
        for sample in range(samples)
    ]


def drawn_seed(seed: int, number: int) -> int:
    """A seed for prompt `number` of a run. Hashed: seed + number would give run 1 the draws of run 0, shifted."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS


def _mismatch(spec: FieldType, value: Any) -> str:
    """Why a JSON value does not fit. Stricter than the command line, where everything begins as text."""
    if value is None:
        return "" if spec.optional else "is null"
    if spec.type is list:
        assert spec.item is not None
        if not isinstance(value, list):
            return "is not a list"
        return next((f"holds an item that {reason}" for item in value if (reason := _mismatch(spec.item, item))), "")
    kinds: dict[type, tuple[type, ...]] = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}
    if not isinstance(value, kinds[spec.type]) or (isinstance(value, bool) and spec.type is not bool):
        return f"is of another type: {type(value).__name__}"
    # A number beyond the range of floats can be compared with none.
    if isinstance(value, int) and abs(value) >= 2**63:
        return "is out of range"
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number"
    return spec.mismatch(value)
