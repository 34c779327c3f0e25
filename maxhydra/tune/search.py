"""The order in which candidates are tried. Which comes next follows from the times so far and nothing else, so that a
search that was cut short goes on by asking again for what is known already.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from maxhydra.tune.space import Axis, Candidate

# Times of what is as fast as the best but for this much are worth a look at what is a part of it, such as the tiles of
# a kernel: sizes change a step's time by a few per cent.
CLOSE = 1.05
# (candidate, steps) -> seconds a token; infinite where it does not run. May raise OutOfTime.
Measure = Callable[[Candidate, int], float]


class OutOfTime(Exception):
    """The time is spent; what was measured stands."""


def one_by_one(space: Sequence[Axis], measure: Measure, *, steps: int) -> list[Candidate]:
    """All candidates that were tried: each setting in turn with the best of the others, until a round changes nothing.

    Where none of a setting's values runs, the last is kept, which needs the least memory. What is a part of another
    setting is tried where that one is close to the best.
    """
    tried: list[Candidate] = [{}]
    best: Candidate = {}
    time = measure(best, steps)
    while True:
        before = time
        for axis in space:
            options = [_standing({**best, **axis.under, axis.key: override}, space) for override in axis.values]
            if axis.under:
                options.insert(0, {**best, **axis.under})
                if not measure(options[0], steps) < CLOSE * time:
                    continue
            times = [measure(option, steps) for option in options]
            tried += [option for option in options if option not in tried]
            fastest = min(times)
            if fastest < time or math.isinf(time):
                last = len(times) - 1 - times[::-1].index(fastest)
                best, time = options[last], fastest
        if time == before:
            return tried


def _standing(candidate: Candidate, space: Sequence[Axis]) -> Candidate:
    """Without the parts of settings that it has no more."""
    fallen = {axis.key for axis in space if not axis.under.items() <= candidate.items()}
    return {key: override for key, override in candidate.items() if key not in fallen}


def grid(space: Sequence[Axis], measure: Measure, *, steps: int) -> list[Candidate]:
    """Every combination, and the settings as they are."""
    combinations = itertools.product(*(axis.values for axis in space))
    keys = [axis.key for axis in space]
    tried: list[Candidate] = [{}, *(dict(zip(keys, overrides, strict=True)) for overrides in combinations)]
    for candidate in tried:
        measure(candidate, steps)
    return tried


def eliminate(tried: Sequence[Candidate], measure: Measure, *, steps: int, finalists: int) -> None:
    """Time the best again, over twice the steps of the round before, and let the better half go on to the next."""
    field = _fastest(tried, measure, steps, finalists)
    while len(field) > 1:
        steps *= 2
        field = _fastest(field, measure, steps, math.ceil(len(field) / 2))


def _fastest(candidates: Sequence[Candidate], measure: Measure, steps: int, count: int) -> list[Candidate]:
    """Those that run, the fastest first; the same settings in other words once."""
    times: dict[float, Candidate] = {}
    for candidate in candidates:
        time = measure(candidate, steps)
        if math.isfinite(time):
            times.setdefault(time, candidate)
    return [times[time] for time in sorted(times)[:count]]
