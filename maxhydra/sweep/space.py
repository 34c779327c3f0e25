"""What a sweep searches, from the syntax of Hydra's overrides to distributions.

a,b,c and choice(a,b,c) are categories; range(1,9,2) whole or even steps; interval(0,1) all numbers between, and
tag(log,interval(1e-5,1e-2)) all orders of magnitude alike; int(interval(1,8)) whole numbers.
"""

import math
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna import distributions as optuna

from maxhydra.config.compose.overrides import parse
from maxhydra.config.errors import ConfigError, Problem


def distributions(space: dict[str, str], *, grid: bool) -> dict[str, optuna.BaseDistribution]:
    """Key -> distribution, in the order given. All mistakes at once."""
    parsed = parse([f"{key}={text}" for key, text in space.items()], loader=None)
    problems = list(parsed.problems)
    found: dict[str, optuna.BaseDistribution] = {}
    for override in parsed.overrides:
        key = override.get_key_element()
        made = _distribution(override)
        if isinstance(made, Problem):
            problems.append(made)
        elif grid and _is_open(made):
            hint = "write the values out, or choose another hydra.sweeper.sampler"
            problems.append(Problem(key, "has no end of values for a grid", space[key], hint=hint))
        else:
            found[key] = made
    if problems:
        raise ConfigError(problems)
    return found


def grid_values(distribution: optuna.BaseDistribution) -> list[Any]:
    """Every value of a distribution that has finitely many."""
    if isinstance(distribution, optuna.CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, (optuna.IntDistribution, optuna.FloatDistribution)) and distribution.step
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    return [distribution.low + index * distribution.step for index in range(count)]


def overrides_of(params: dict[str, Any]) -> list[str]:
    """What a job is given: values as the command line would have them."""
    return [f"{key}={value}" for key, value in params.items()]


def _distribution(override: Override) -> optuna.BaseDistribution | Problem:
    key, value, text = override.get_key_element(), override.value(), override.get_value_string()
    if isinstance(value, ChoiceSweep):
        choices = list(override.sweep_string_iterator())
        return optuna.CategoricalDistribution(choices)
    if isinstance(value, RangeSweep):
        return _stepped(key, text, value)
    if isinstance(value, IntervalSweep):
        return _between(key, text, value)
    hint = "several values, range(...) or interval(...)"
    return Problem(key, "is one value, and nothing to search", text, hint=hint)


def _stepped(key: str, text: str, sweep: RangeSweep) -> optuna.BaseDistribution | Problem:
    """Hydra's range ends before its stop, as Python's does."""
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None and stop is not None
    count = math.ceil((stop - start) / step) if step else 0
    if count < 1:
        return Problem(key, "is an empty range", text, "range(start, stop, step) with a value or more")
    last = start + (count - 1) * step
    low, high, step = min(start, last), max(start, last), abs(step)
    if isinstance(low, int) and isinstance(high, int) and isinstance(step, int):
        return optuna.IntDistribution(low, high, step=step)
    return optuna.FloatDistribution(float(low), float(high), step=float(step))


def _between(key: str, text: str, sweep: IntervalSweep) -> optuna.BaseDistribution | Problem:
    start, end, is_log = sweep.start, sweep.end, "log" in sweep.tags
    assert start is not None and end is not None
    if start >= end:
        return Problem(key, "is an empty interval", text, "interval(start, end) with start under end")
    if is_log and start <= 0:
        return Problem(key, "has no logarithm at its start", text, "a start over 0")
    if isinstance(start, int) and isinstance(end, int):
        return optuna.IntDistribution(start, end, log=is_log)
    return optuna.FloatDistribution(float(start), float(end), log=is_log)


def _is_open(distribution: optuna.BaseDistribution) -> bool:
    return not isinstance(distribution, optuna.CategoricalDistribution) and distribution.step is None  # type: ignore[attr-defined]


def split(overrides: Iterable[Override]) -> tuple[list[str], dict[str, str]]:
    """Overrides of a sweep: those that all jobs share, and key -> what is searched."""
    fixed, space = [], {}
    for override in overrides:
        if override.is_sweep_override():
            space[override.get_key_element()] = override.get_value_string()
        else:
            fixed.append(override.input_line or "")
    return fixed, space
