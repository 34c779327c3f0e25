"""A next step after a grid sweep: values around the best job, or more seeds."""

import math
from collections.abc import Sequence

from maxhydra.launch.base import Trial
from maxhydra.sweep.plan import SweepPlan

SEED = "run.seed"


def suggest_extension(plan: SweepPlan, best: Trial) -> str:
    """Override for `sweep extend`: new values of a real-valued key near its best one; else two more seeds."""
    chosen = dict(line.partition("=")[::2] for line in best.overrides)
    for key in plan.varied:
        values = [line.partition("=")[2] for line in plan.choices[key]]
        if key in chosen and (new := nearby_values(values, chosen[key])):
            return f"{key}={','.join(new)}"
    used = [line.partition("=")[2] for line in plan.choices.get(SEED, [])]
    last = max((int(value) for value in used if value.isdecimal()), default=0)
    return f"{SEED}={last + 1},{last + 2}"


def nearby_values(values: Sequence[str], best: str) -> list[str]:
    """Beyond the best value if it is the smallest or largest, else between it and its neighbors, on a log scale.

    Empty unless all values are positive real numbers: sizes of a model or a mesh have further constraints.
    """
    try:
        if all(value.isdecimal() for value in values):
            return []
        numbers = sorted(map(float, values))
        position = numbers.index(float(best))
    except ValueError:
        return []
    if numbers[0] <= 0 or not math.isfinite(numbers[-1]):
        return []
    before, after = numbers[:position][-1:], numbers[position + 1 :][:1]
    if before and after:
        new = [math.sqrt(numbers[position] * neighbor) for neighbor in (*before, *after)]
    else:
        (neighbor,) = before or after
        new = [numbers[position] ** 2 / neighbor]
    return [f"{value:.3g}" for value in new]
