"""Importance of settings: the share of a result's variance that each setting explains on its own."""

import math
from collections.abc import Mapping, Sequence

from maxhydra.runs.config_sections import Cell

# Minimum number of runs for a meaningful estimate.
MIN_RUNS = 4


def importance(settings: Mapping[str, Sequence[Cell | None]], results: Sequence[float]) -> dict[str, float]:
    """Share of the variance of the results that each setting explains, largest first.

    One-way analysis of variance with Kelley's epsilon squared, (SS_between - (k - 1) MS_within) / SS_total: unlike the
    plain ratio, it is near 0 for a setting unrelated to the result, however many values it takes. A setting with many
    values is binned into groups of equal size first. Interactions between settings are not detected.
    """
    if len(results) < MIN_RUNS:
        return {}
    shares = {name: _share(_groups(values), results) for name, values in settings.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _groups(values: Sequence[Cell | None]) -> list[int]:
    """Group index of each value: one group per recurring value, or about sqrt(n) groups of equal size."""
    distinct = sorted(set(values), key=_rank)
    if len(distinct) <= max(2, len(values) // 2):
        return [distinct.index(value) for value in values]
    count = max(2, math.isqrt(len(values)))
    ranking = sorted(range(len(values)), key=lambda index: _rank(values[index]))
    group = {index: rank * count // len(values) for rank, index in enumerate(ranking)}
    return [group[index] for index in range(len(values))]


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
