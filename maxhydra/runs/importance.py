"""Which settings of a sweep made the difference: the share of the variance of the results that each one explains."""

import math
import operator
from collections.abc import Mapping, Sequence

from maxhydra.runs.settings import Cell

# Minimum number of runs for a meaningful estimate.
MIN_RUNS = 4
# Products of a fit of all settings at once, which takes about a second.
MAX_OPERATIONS = 5_000_000


def importance(settings: Mapping[str, Sequence[Cell | None]], results: Sequence[float]) -> dict[str, float]:
    """Share of the variance of the results that each setting explains, largest first.

    Analysis of variance without interactions, with Kelley's epsilon squared, (SS - df MS_residual) / SS_total: unlike
    the plain ratio, it is near 0 for a setting unrelated to the result, however many values it takes. SS is what the
    setting explains on its own, or what it adds to a model of all others (type II), whichever share is larger: in a
    grid, the second one shows a small effect next to a large one. It needs more results than there are groups. A
    setting with many values is binned into groups of equal size first.
    """
    if len(results) < MIN_RUNS:
        return {}
    columns = {name: _indicators(_groups(values)) for name, values in settings.items()}
    count = sum(map(len, columns.values()))
    is_joint = count + 1 < len(results) and len(results) * count**2 < MAX_OPERATIONS
    shares = {}
    for name, own in columns.items():
        others = [column for key, each in columns.items() if key != name for column in each] if is_joint else []
        shares[name] = max(_share(own, [], results), _share(own, others, results))
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


def _indicators(groups: Sequence[int]) -> list[list[float]]:
    """A column for each group but the first, with 1 for its members."""
    return [[float(group == index) for group in groups] for index in range(1, max(groups) + 1)]


def _share(own: Sequence[list[float]], others: Sequence[list[float]], results: Sequence[float]) -> float:
    """Corrected share of the variance that the columns of a setting explain beyond those of the others."""
    total, _ = _residual([], results)
    without, others_count = _residual(others, results)
    residual, count = _residual([*others, *own], results)
    freedom = len(results) - 1 - count
    if total == 0 or freedom <= 0:
        return 0.0
    return max(0.0, (without - residual - (count - others_count) * residual / freedom) / total)


def _residual(columns: Sequence[list[float]], results: Sequence[float]) -> tuple[float, int]:
    """Sum of squares that a least-squares fit of the columns and a constant leaves, and the rank of the columns."""
    basis: list[list[float]] = []
    rest = _centered(results)
    for column in map(_centered, columns):
        size = math.sqrt(_dot(column, column))
        for vector in basis:
            column = _without(column, vector)
        length = math.sqrt(_dot(column, column))
        if length > 1e-9 * size:
            basis.append([value / length for value in column])
            rest = _without(rest, basis[-1])
    return _dot(rest, rest), len(basis)


def _centered(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, a, b))


def _without(values: Sequence[float], direction: Sequence[float]) -> list[float]:
    """A vector without its component in a direction of unit length."""
    size = _dot(values, direction)
    return [value - size * other for value, other in zip(values, direction, strict=True)]
