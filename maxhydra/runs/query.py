"""Filter and sort runs: `status=finished`, `optimizer.learning_rate>=1e-3`, `eval/loss<2`, `tag=first`."""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.config.schema.metrics import is_maximized
from maxhydra.record.atomic_io import read_json
from maxhydra.record.facts import SWEEP_FILE
from maxhydra.runs.registry import STATUSES, Registry, Run

_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(?P<key>[^=<>!~]+)(?P<sign><=|>=|!=|=|<|>|~)(?P<value>.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Condition:
    """A key, an operator and a value; `~` searches for a substring, ignoring case."""

    key: str
    sign: str
    value: str

    def holds(self, actual: Any) -> bool:
        """For a list (tags), true if any entry matches; a run without the key matches only `!=`."""
        if self.sign == "!=":
            return not dataclasses.replace(self, sign="=").holds(actual)
        if isinstance(actual, tuple):
            return any(self.holds(entry) for entry in actual)
        if actual is None:
            return False
        if self.sign == "~":
            return self.value.lower() in str(actual).lower()
        expected = parse_number(self.value) if isinstance(actual, (int, float)) else self.value
        if self.sign == "=":
            return bool(actual == expected)
        return expected is not None and _ORDERS[self.sign](actual, expected)


def parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_condition(text: str) -> Condition:
    """Parse `key=value`, also with != < <= > >= ~ as the operator."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        accepted = "key=value, also with != < <= > >= and ~ (contains)"
        raise ConfigError(Problem(text, "is not a condition", accepted=accepted))
    condition = Condition(match["key"].strip(), match["sign"], match["value"].strip())
    if condition.value.startswith(tuple("=<>!~")):
        reason, accepted = "has two operators", "one of = != < <= > >= and ~ (contains)"
        raise ConfigError(Problem(text, reason, accepted=accepted))
    if condition.key == "status" and condition.sign in ("=", "!=") and condition.value not in STATUSES:
        hint = did_you_mean(condition.value, STATUSES)
        raise ConfigError(Problem("status", "is not a status", condition.value, ", ".join(STATUSES), hint))
    return condition


def select_runs(registry: Registry, conditions: Sequence[str], *, runs: Sequence[Run] | None = None) -> list[Run]:
    """Runs that match every condition. Raises one ConfigError with all invalid conditions."""
    matches = list(registry.runs() if runs is None else runs)
    problems, parsed = [], []
    for text in conditions:
        try:
            condition = parse_condition(text)
            values = registry.values(condition.key, matches)
            if condition.sign in _ORDERS and parse_number(condition.value) is None and _has_numbers(values):
                reason = f"compares numbers with {condition.value!r}"
                problems.append(Problem(text, reason, accepted=f"{condition.key}{condition.sign}NUMBER"))
            parsed.append((condition, values))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    for condition, values in parsed:
        matches = [run for run in matches if condition.holds(values.get(run.id))]
    return matches


def _has_numbers(values: Mapping[int, Any]) -> bool:
    return any(isinstance(value, (int, float)) for value in values.values())


def sort_runs(registry: Registry, runs: Sequence[Run], key: str, *, descending: bool) -> list[Run]:
    """Sort by a field, setting or metric; runs without it, and NaN, come last in either direction."""
    values = registry.values(key, runs)
    known = [run for run in runs if _is_known(values.get(run.id))]
    unknown = [run for run in runs if not _is_known(values.get(run.id))]
    return sorted(known, key=lambda run: _rank(values[run.id]), reverse=descending) + unknown


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _rank(value: Any) -> tuple[bool, Any]:
    """Sort key that places numbers before text."""
    return (False, value) if isinstance(value, (int, float)) else (True, str(value))


class Ranking(NamedTuple):
    """Runs in the order of a metric."""

    metric: str
    runs: list[Run]
    """Those that have the metric, best first."""
    largest: bool
    """Whether larger values are better."""


def rank_runs(registry: Registry, runs: Sequence[Run], metric: str | None, *, largest: bool | None = None) -> Ranking:
    """Rank runs by a metric; default: their objective. `largest` None: see `is_larger_better`."""
    name = metric or _objective(registry, runs)
    # A configured objective may have no values yet; a metric given by the user is checked for typos.
    values: dict[int, Any] = registry.values(name, runs) if metric else {**registry.metric(name)}
    ranked = [run for run in runs if isinstance(values.get(run.id), (int, float)) and _is_known(values[run.id])]
    if largest is None:
        sweeps = {run.sweep for run in runs}
        largest = is_larger_better(name, registry.root / sweeps.pop() if len(sweeps) == 1 else registry.root)
    return Ranking(name, sorted(ranked, key=lambda run: values[run.id], reverse=largest), largest)


def is_larger_better(metric: str, folder: Path) -> bool:
    """Whether larger values of a metric are better: by the plan of a search for it, otherwise by its name."""
    metric = metric.removesuffix(":min").removesuffix(":max")
    try:
        plan = read_json(folder / SWEEP_FILE)
        objectives, directions = plan["objectives"], plan["settings"]["directions"]
        if metric in objectives:
            return bool(directions) and directions[objectives.index(metric)] == "maximize"
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return is_maximized(metric)


def _objective(registry: Registry, runs: Sequence[Run]) -> str:
    configured = registry.setting("objective")
    names = {str(name) for run in runs if (name := run.objective or configured.get(run.id))}
    if len(names) != 1:
        reason = (
            f"the runs have different objectives: {', '.join(sorted(names))}" if names else "no run has an objective"
        )
        raise ConfigError(Problem("--metric", "is required", hint=reason))
    return names.pop()
