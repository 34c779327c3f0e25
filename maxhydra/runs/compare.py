"""Differences between runs: config, code, packages, and metrics."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.settings import Cell
from maxhydra.runs.summary import Facts

# Settings that differ between any two runs and do not explain a different result.
_ALWAYS_DIFFERENT = ("run.name", "run.outputs", "run.notes", "run.tags")


@dataclasses.dataclass(frozen=True)
class Difference:
    """A key and its value in each run; None if a run does not have it."""

    name: str
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences between `runs`; the values of each `Difference` are in the same order."""

    runs: tuple[Run, ...]
    config: tuple[Difference, ...]
    metrics: tuple[Difference, ...]
    surroundings: tuple[Difference, ...]


def differing_keys(configs: Sequence[Mapping[str, Cell]]) -> list[str]:
    """Keys whose values are not the same in all configs, except names and notes."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if key not in _ALWAYS_DIFFERENT and len({config.get(key) for config in configs}) > 1]


def compare(registry: Registry, runs: Sequence[Run]) -> Comparison:
    """Compare runs: settings and environment that differ, and all metrics."""
    ids = [run.id for run in runs]
    settings, metrics = registry.settings(ids), registry.metrics(ids)
    configs = [settings[id] for id in ids]
    names = dict.fromkeys(name for id in ids for name in metrics[id])
    environments = [_environment(registry.facts(run)) for run in runs]
    changed_keys, changed_names = sorted(differing_keys(configs)), differing_keys(environments)
    return Comparison(
        tuple(runs),
        tuple(Difference(key, tuple(config.get(key) for config in configs)) for key in changed_keys),
        tuple(Difference(name, tuple(metrics[id].get(name) for id in ids)) for name in names),
        tuple(Difference(name, tuple(each.get(name) for each in environments)) for name in changed_names),
    )


def _environment(facts: Facts) -> dict[str, Any]:
    """Code, machine and package versions of a run."""
    git, packages = facts.get("git") or {}, facts.get("packages") or {}
    code = {"commit": git.get("sha"), "uncommitted changes": "yes" if git.get("dirty") else "no"}
    machine = {name: facts.get(name) for name in ("host", "devices", "python", "platform")}
    return {**code, **machine, **{f"package {name}": version for name, version in packages.items()}}
