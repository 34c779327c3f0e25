"""Search spaces: Hydra's sweep syntax converted to Optuna distributions.

a,b,c and choice(a,b,c) are categorical; range(1,9,2) is stepped; interval(0,1) is uniform;
tag(log,interval(1e-5,1e-2)) is log-uniform; int(interval(1,8)) is integer-valued.
"""

import math
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna import distributions as optuna

from maxhydra.config.compose.overrides import parse
from maxhydra.config.errors import ConfigError, Problem


def distributions(space: dict[str, str], *, grid: bool) -> dict[str, optuna.BaseDistribution]:
    """Map keys to distributions, in the given order. Raises one ConfigError with all problems."""
    parsed = parse([f"{key}={text}" for key, text in space.items()], loader=None)
    problems = list(parsed.problems)
    result: dict[str, optuna.BaseDistribution] = {}
    for override in parsed.overrides:
        key = override.get_key_element()
        distribution = _distribution(override)
        if isinstance(distribution, Problem):
            problems.append(distribution)
        elif grid and _is_continuous(distribution):
            hint = "list the values, or choose another hydra.sweeper.sampler"
            problems.append(Problem(key, "is continuous, but a grid needs discrete values", space[key], hint=hint))
        else:
            result[key] = distribution
    if problems:
        raise ConfigError(problems)
    return result


def grid_values(distribution: optuna.BaseDistribution) -> list[Any]:
    """All values of a discrete distribution."""
    if isinstance(distribution, optuna.CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, (optuna.IntDistribution, optuna.FloatDistribution)) and distribution.step
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    return [distribution.low + index * distribution.step for index in range(count)]


def overrides_of(params: dict[str, Any]) -> list[str]:
    """Overrides that set sampled parameters."""
    return [f"{key}={value}" for key, value in params.items()]


def _distribution(override: Override) -> optuna.BaseDistribution | Problem:
    key, value, text = override.get_key_element(), override.value(), override.get_value_string()
    if isinstance(value, ChoiceSweep):
        choices = list(override.sweep_string_iterator())
        return optuna.CategoricalDistribution(choices)
    if isinstance(value, RangeSweep):
        return _range_distribution(key, text, value)
    if isinstance(value, IntervalSweep):
        return _interval_distribution(key, text, value)
    hint = "give several values, range(...) or interval(...)"
    return Problem(key, "is a single value, which cannot be searched", text, hint=hint)


def _range_distribution(key: str, text: str, sweep: RangeSweep) -> optuna.BaseDistribution | Problem:
    """Distribution of range(start, stop, step), which excludes stop as in Python."""
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None and stop is not None
    count = math.ceil((stop - start) / step) if step else 0
    if count < 1:
        return Problem(key, "is an empty range", text, "range(start, stop, step) with at least one value")
    last = start + (count - 1) * step
    low, high, step = min(start, last), max(start, last), abs(step)
    if isinstance(low, int) and isinstance(high, int) and isinstance(step, int):
        return optuna.IntDistribution(low, high, step=step)
    return optuna.FloatDistribution(float(low), float(high), step=float(step))


def _interval_distribution(key: str, text: str, sweep: IntervalSweep) -> optuna.BaseDistribution | Problem:
    start, end, is_log = sweep.start, sweep.end, "log" in sweep.tags
    assert start is not None and end is not None
    if start >= end:
        return Problem(key, "is an empty interval", text, "interval(start, end) with start < end")
    if is_log and start <= 0:
        return Problem(key, "is log-scaled but does not start above 0", text, "a start > 0")
    if isinstance(start, int) and isinstance(end, int):
        return optuna.IntDistribution(start, end, log=is_log)
    return optuna.FloatDistribution(float(start), float(end), log=is_log)


def _is_continuous(distribution: optuna.BaseDistribution) -> bool:
    return not isinstance(distribution, optuna.CategoricalDistribution) and distribution.step is None  # type: ignore[attr-defined]


def split_overrides(overrides: Iterable[Override]) -> tuple[list[str], dict[str, str]]:
    """Split a sweep's overrides into those fixed for all jobs and the search space (key -> sweep expression)."""
    fixed, space = [], {}
    for override in overrides:
        if override.is_sweep_override():
            space[override.get_key_element()] = override.get_value_string()
        else:
            fixed.append(override.input_line or "")
    return fixed, space
