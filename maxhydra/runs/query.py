"""Which runs, in which order: `status=finished`, `optimizer.learning_rate>=1e-3`, `eval/loss<2`, `tag=first`."""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from maxhydra.config.errors import ConfigError, Problem, did_you_mean
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
    """A key, a sign and what it is compared with; `~` finds a piece of text, in any case."""

    key: str
    sign: str
    value: str

    def holds(self, found: Any) -> bool:
        """For a list (tags), whether it holds for any entry; a run without the key meets only `!=`."""
        if self.sign == "!=":
            return not dataclasses.replace(self, sign="=").holds(found)
        if isinstance(found, tuple):
            return any(self.holds(entry) for entry in found)
        if found is None:
            return False
        if self.sign == "~":
            return self.value.lower() in str(found).lower()
        wanted = number(self.value) if isinstance(found, (int, float)) else self.value
        if self.sign == "=":
            return bool(found == wanted)
        return wanted is not None and _ORDERS[self.sign](found, wanted)


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse(text: str) -> Condition:
    """`key=value`, with any of = != < <= > >= ~ between."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        accepted = "key=value, also with != < <= > >= and ~ (contains)"
        raise ConfigError(Problem(text, "is not a condition", accepted=accepted))
    condition = Condition(match["key"].strip(), match["sign"], match["value"].strip())
    if condition.key == "status" and condition.sign in ("=", "!=") and condition.value not in STATUSES:
        hint = did_you_mean(condition.value, STATUSES)
        raise ConfigError(Problem("status", "no such status", condition.value, ", ".join(STATUSES), hint))
    return condition


def select(registry: Registry, conditions: Sequence[str], *, runs: Sequence[Run] | None = None) -> list[Run]:
    """The runs that meet every condition; all mistakes are told at once."""
    chosen = list(registry.runs() if runs is None else runs)
    problems, parsed = [], []
    for text in conditions:
        try:
            condition = parse(text)
            parsed.append((condition, registry.values(condition.key, chosen)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    for condition, values in parsed:
        chosen = [run for run in chosen if condition.holds(values.get(run.id))]
    return chosen


def order(registry: Registry, runs: Sequence[Run], key: str, *, descending: bool) -> list[Run]:
    """Sorted by any field, setting or metric; runs without it, and NaN, come last either way."""
    values = registry.values(key, runs)

    def has(run: Run) -> bool:
        value = values.get(run.id)
        return value is not None and not (isinstance(value, float) and math.isnan(value))

    def rank(run: Run) -> tuple[bool, Any]:
        value = values[run.id]
        return (False, value) if isinstance(value, (int, float)) else (True, str(value))

    known = [run for run in runs if has(run)]
    return sorted(known, key=rank, reverse=descending) + [run for run in runs if not has(run)]


def best(registry: Registry, runs: Sequence[Run], metric: str | None, *, largest: bool) -> tuple[str, list[Run]]:
    """The runs that have the metric, best first, and its name; without one it is what the runs were to make small."""
    if metric is None:
        names = {run.objective for run in runs if run.objective}
        if len(names) != 1:
            said = f"the runs have different objectives: {', '.join(sorted(names))}" if names else "no run has ended"
            raise ConfigError(Problem("--metric", "is needed", hint=said))
        (metric,) = names
    values = registry.values(metric, runs)
    ranked = order(registry, runs, metric, descending=largest)
    return metric, [run for run in ranked if isinstance(values.get(run.id), (int, float))]
