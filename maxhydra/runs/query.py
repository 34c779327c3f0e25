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
    known = [run for run in runs if _is_known(values.get(run.id))]
    unknown = [run for run in runs if not _is_known(values.get(run.id))]
    return sorted(known, key=lambda run: _rank(values[run.id]), reverse=descending) + unknown


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _rank(value: Any) -> tuple[bool, Any]:
    """Numbers before text."""
    return (False, value) if isinstance(value, (int, float)) else (True, str(value))


def best(registry: Registry, runs: Sequence[Run], metric: str | None, *, largest: bool) -> tuple[str, list[Run]]:
    """The runs that have the metric, best first, and its name; without one it is what the runs were to make small."""
    name = metric or _objective(registry, runs)
    # An objective that no run has reached yet is no mistake; a name that somebody typed may be.
    values: dict[int, Any] = registry.values(name, runs) if metric else {**registry.metric(name)}
    ranked = [run for run in runs if isinstance(values.get(run.id), (int, float)) and _is_known(values[run.id])]
    return name, sorted(ranked, key=lambda run: values[run.id], reverse=largest)


def _objective(registry: Registry, runs: Sequence[Run]) -> str:
    configured = registry.setting("objective")
    names = {str(name) for run in runs if (name := run.objective or configured.get(run.id))}
    if len(names) != 1:
        said = (
            f"the runs have different objectives: {', '.join(sorted(names))}" if names else "no run names an objective"
        )
        raise ConfigError(Problem("--metric", "is needed", hint=said))
    return names.pop()
