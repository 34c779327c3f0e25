"""How much of the spread of a result goes with each setting, taken alone."""

import math
from collections.abc import Mapping, Sequence

from maxhydra.runs.config_sections import Cell

# Fewer runs than these say nothing.
FEWEST = 4


def importance(settings: Mapping[str, Sequence[Cell | None]], results: Sequence[float]) -> dict[str, float]:
    """Share of the variance of the results that each setting explains, largest first.

    One-way analysis of variance with Kelley's epsilon squared, (SS_between - (k - 1) MS_within) / SS_total: unlike the
    plain ratio it is near 0 for a setting that has nothing to do with the result, however many values it takes. A
    setting with many values is cut into groups of equal size first. Effects of several settings together are not seen.
    """
    if len(results) < FEWEST:
        return {}
    shares = {name: _share(_groups(values), results) for name, values in settings.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _groups(values: Sequence[Cell | None]) -> list[int]:
    """Number of the group of each value: one for each value that comes back, or about sqrt(n) of equal size."""
    distinct = sorted(set(values), key=_rank)
    if len(distinct) <= max(2, len(values) // 2):
        return [distinct.index(value) for value in values]
    count = max(2, math.isqrt(len(values)))
    places = sorted(range(len(values)), key=lambda place: _rank(values[place]))
    group = {place: order * count // len(values) for order, place in enumerate(places)}
    return [group[place] for place in range(len(values))]


def _rank(value: Cell | None) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def _share(groups: Sequence[int], results: Sequence[float]) -> float:
    members: dict[int, list[float]] = {}
    for group, result in zip(groups, results, strict=True):
        members.setdefault(group, []).append(result)
    mean = math.fsum(results) / len(results)
    total = math.fsum((result - mean) ** 2 for result in results)
    within = math.fsum((x - math.fsum(group) / len(group)) ** 2 for group in members.values() for x in group)
    freedom = len(results) - len(members)
    if total == 0 or freedom <= 0:
        return 0.0
    return max(0.0, (total - within - (len(members) - 1) * within / freedom) / total)
