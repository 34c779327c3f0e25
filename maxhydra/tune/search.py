"""The order in which candidates are tried.

The next candidate depends only on the times so far, so an interrupted search resumes by asking for known times again.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from maxhydra.tune.space import Axis, Candidate

# A setting within this factor of the best time is worth trying the settings that depend on it, such as the tiles of a
# kernel: tile sizes change the step time by a few per cent.
NEAR_BEST = 1.05
# (candidate, steps) -> seconds per token; infinite if it does not run. May raise OutOfTime.
Measure = Callable[[Candidate, int], float]


class OutOfTime(Exception):
    """The time limit is reached; the measurements so far remain valid."""


def one_by_one(space: Sequence[Axis], measure: Measure, *, steps: int) -> list[Candidate]:
    """Coordinate descent: vary each setting with the best values of the others until a round changes nothing.

    Returns all candidates that were tried. If no value of a setting runs, the last one is used, which needs the least
    memory. A setting that depends on another is tried if that one is near the best.
    """
    tried: list[Candidate] = [{}]
    best: Candidate = {}
    time = measure(best, steps)
    while True:
        time_before = time
        for axis in space:
            options = [_drop_dependents({**best, **axis.under, axis.key: override}, space) for override in axis.values]
            if axis.under:
                options.insert(0, {**best, **axis.under})
                if not measure(options[0], steps) < NEAR_BEST * time:
                    continue
            times = [measure(option, steps) for option in options]
            tried += [option for option in options if option not in tried]
            fastest = min(times)
            if fastest < time or math.isinf(time):
                last = len(times) - 1 - times[::-1].index(fastest)
                best, time = options[last], fastest
        if time == time_before:
            return tried


def _drop_dependents(candidate: Candidate, space: Sequence[Axis]) -> Candidate:
    """The candidate without settings that depend on a value which it no longer has."""
    dropped = {axis.key for axis in space if not axis.under.items() <= candidate.items()}
    return {key: override for key, override in candidate.items() if key not in dropped}


def grid(space: Sequence[Axis], measure: Measure, *, steps: int) -> list[Candidate]:
    """Every combination, and the unchanged config."""
    combinations = itertools.product(*(axis.values for axis in space))
    keys = [axis.key for axis in space]
    tried: list[Candidate] = [{}, *(dict(zip(keys, overrides, strict=True)) for overrides in combinations)]
    for candidate in tried:
        measure(candidate, steps)
    return tried


def eliminate(tried: Sequence[Candidate], measure: Measure, *, steps: int, finalists: int) -> None:
    """Successive halving: time the best again over twice the steps, and keep the better half for the next round."""
    remaining = _fastest(tried, measure, steps, finalists)
    while len(remaining) > 1:
        steps *= 2
        remaining = _fastest(remaining, measure, steps, math.ceil(len(remaining) / 2))


def _fastest(candidates: Sequence[Candidate], measure: Measure, steps: int, count: int) -> list[Candidate]:
    """The `count` fastest candidates that run; candidates that resolve to the same config count once."""
    times: dict[float, Candidate] = {}
    for candidate in candidates:
        time = measure(candidate, steps)
        if math.isfinite(time):
            times.setdefault(time, candidate)
    return [times[time] for time in sorted(times)[:count]]
