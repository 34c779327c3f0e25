"""What differs between runs: settings, code and packages, and what came of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.runs.config_sections import Cell
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.summary import Facts

# Settings that differ between any two runs and say nothing about why they went differently.
_ALWAYS = ("run.name", "run.outputs", "run.notes", "run.tags")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing, and what it is in each run; None where a run has none of it."""

    name: str
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of the same runs in the same order."""

    runs: tuple[Run, ...]
    config: tuple[Difference, ...]
    metrics: tuple[Difference, ...]
    surroundings: tuple[Difference, ...]


def differing(configs: Sequence[Mapping[str, Cell]]) -> list[str]:
    """Keys that are not the same in all configs, but for names and notes."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if key not in _ALWAYS and len({config.get(key) for config in configs}) > 1]


def compare(registry: Registry, runs: Sequence[Run]) -> Comparison:
    """Settings and surroundings that differ, and every metric of any."""
    ids = [run.id for run in runs]
    settings, metrics = registry.settings(ids), registry.metrics(ids)
    configs = [settings[id] for id in ids]
    names = dict.fromkeys(name for id in ids for name in metrics[id])
    around = [_surroundings(registry.directory(run).read()) for run in runs]
    return Comparison(
        tuple(runs),
        tuple(Difference(key, tuple(config.get(key) for config in configs)) for key in sorted(differing(configs))),
        tuple(Difference(name, tuple(metrics[id].get(name) for id in ids)) for name in names),
        tuple(Difference(name, tuple(facts.get(name) for facts in around)) for name in differing(around)),
    )


def _surroundings(facts: Facts) -> dict[str, Any]:
    """What the run stood on besides its config."""
    git, packages = facts.get("git") or {}, facts.get("packages") or {}
    code = {"commit": git.get("sha"), "uncommitted changes": "yes" if git.get("dirty") else "no"}
    same = {name: facts.get(name) for name in ("host", "devices", "python", "platform")}
    return {**code, **same, **{f"package {name}": version for name, version in packages.items()}}
