"""Runs that differ only in their seeds: mean of a metric, with the confidence interval of the mean."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from maxhydra.runs.compare import differing_keys
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.settings import Cell
from maxhydra.runs.summary import format_number

# End of the keys that hold a seed: run.seed, run.weights_seed, run.data_seed.
SEED = "seed"
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs with the same settings except for seeds."""

    settings: dict[str, Cell | None]
    """Settings that differ between groups."""
    runs: list[Run]
    mean: float
    margin: float | None
    """Half the width of the confidence interval; None for a single run."""

    @property
    def value(self) -> str:
        """Mean and margin: 2.413 ± 0.021."""
        mean = format_number(self.mean)
        return mean if self.margin is None else f"{mean} ± {self.margin:.2g}"


def group_by_seed(registry: Registry, runs: Sequence[Run], values: Mapping[int, float]) -> list[SeedGroup]:
    """Group runs by all settings except seeds, in the order of `runs`."""
    settings = registry.settings(run.id for run in runs)
    keys = [key for key in differing_keys(list(settings.values())) if not key.endswith(SEED)]
    groups: dict[tuple[Cell | None, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(settings[run.id].get(key) for key in keys), []).append(run)
    return [_group(dict(zip(keys, cells, strict=True)), members, values) for cells, members in groups.items()]


def _group(settings: dict[str, Cell | None], runs: list[Run], values: Mapping[int, float]) -> SeedGroup:
    found = [values[run.id] for run in runs]
    return SeedGroup(settings, runs, statistics.fmean(found), confidence_margin(found))


def confidence_margin(values: Sequence[float]) -> float | None:
    """Half the width of Student's interval around the mean of a sample; None for a single value."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = confidence for Student's distribution, by bisection over the angle atan(t / sqrt(n))."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, degrees) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _probability(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(n) tan(angle)) as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for index in range(1 + is_odd, degrees + is_odd, 2):
        total += term
        term *= cosine * cosine * index / (index + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
