"""Command line overrides: parsing, application to the merged config, and expansion into the jobs of a sweep."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from maxhydra.config.compose.merge import ConfigMerge
from maxhydra.config.compose.provenance import COMMAND_LINE, locate
from maxhydra.config.errors import Problem, did_you_mean, show

# Override that adds folders of options.
SEARCHPATH = "hydra.searchpath="


@dataclasses.dataclass
class Parsed:
    """Overrides in the order given, and the problems of those that could not be parsed."""

    overrides: list[Override]
    problems: list[Problem]


def parse(texts: list[str], loader: ConfigLoader | None) -> Parsed:
    """Parse each override separately, so that a malformed one does not hide the problems of the others."""
    parser = OverridesParser.create(config_loader=loader)
    parsed = Parsed([], [])
    for text in texts:
        try:
            parsed.overrides.append(parser.parse_override(text))
        except HydraException as error:
            parsed.problems.append(_syntax_problem(text, error))
    return parsed


def _syntax_problem(text: str, error: HydraException) -> Problem:
    key, equals, value = text.partition("=")
    if not equals:
        return Problem(text, "is not an override", accepted="key=value, group=option or ~key", source=COMMAND_LINE)
    reason = f"cannot be parsed: {str(error).splitlines()[0]}"
    hint = f"quote a value with special characters twice, for the shell and for Hydra: '{key}=\"{value}\"'"
    return Problem(key, reason, value=value, hint=hint, source=COMMAND_LINE)


def searchpath(texts: list[str]) -> list[str]:
    """Return the folders that `hydra.searchpath=[...]` adds."""
    given = parse([text for text in texts if text.startswith(SEARCHPATH)], loader=None)
    values = (override.value() for override in given.overrides)
    return [str(folder) for value in values if isinstance(value, list) for folder in value]


def job_overrides(hydra: Any) -> list[str]:
    """Return the overrides of a job as they were given: those of the config, and the folders of its options.

    `${...}` may have another value when the run is started again.
    """
    own, given = (OmegaConf.to_container(part, resolve=False) for part in (hydra.overrides.hydra, hydra.overrides.task))
    assert isinstance(own, list) and isinstance(given, list)
    return [*(line for line in own if line.startswith(SEARCHPATH)), *given]


def requests_sweep(texts: list[str]) -> bool:
    """Return whether hydra.mode requests a sweep instead of the -m flag."""
    return "hydra.mode=MULTIRUN" in texts


def apply_override(merge: ConfigMerge, override: Override) -> None:
    """Apply an override that sets or deletes a value, or record why it cannot be applied."""
    problem = _delete_problem(merge, override) if override.is_delete() else _set_problem(merge, override)
    if problem is not None:
        merge.problems.append(problem)
    elif override.is_delete() and merge.spec(override.key_or_group) is not None:
        merge.remove(override.key_or_group)
    else:
        merge.set_value(override.key_or_group, locate(override.value(), COMMAND_LINE))


def _delete_problem(merge: ConfigMerge, override: Override) -> Problem | None:
    """Return why a key cannot be deleted: only entries of a dict can."""
    path = override.key_or_group
    parent = merge.spec(path.rpartition(".")[0])
    if merge.spec(path) is None or parent is None:
        return None
    if parent.type is not dict:
        hint = f"set {path}=null or another value"
        return Problem(path, "is part of the schema and cannot be deleted", hint=hint, source=COMMAND_LINE)
    return missing_entry(merge, path, merge.new_entry(path))


def _set_problem(merge: ConfigMerge, override: Override) -> Problem | None:
    """Return why a value cannot be set: a new dict entry needs a plus sign, and an existing key must not have one."""
    path, value, adds = override.key_or_group, override.value(), override.is_add() or override.is_force_add()
    entries = [entry for leaf in _leaf_paths(path, value) if (entry := merge.new_entry(leaf))]
    if merge.spec(path) is None:
        return None
    if entries and not adds:
        return missing_entry(merge, path, entries[0])
    spec = merge.spec(entries[0]) if entries else None
    if spec is not None and spec.is_section and f"{path}.".startswith(f"{entries[0]}."):
        return _partial_entry(path, value, entries[0])
    if not entries and override.is_add() and not isinstance(value, (dict, list)):
        hint = f"drop the plus sign: {path}={show(value)}"
        return Problem(path, "already exists", value, hint=hint, source=COMMAND_LINE)
    return None


def _leaf_paths(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaf_paths(f"{path}.{key}", item)
    else:
        yield path


def missing_entry(merge: ConfigMerge, path: str, entry: str) -> Problem | None:
    """Return the problem of a path through a dict entry that does not exist; None if `entry` is empty."""
    if not entry:
        return None
    parent, _, name = entry.rpartition(".")
    known = merge.names(parent)
    hint = did_you_mean(name, known) or f"add it with a plus sign: +{path}=..."
    return Problem(path, f"{parent} has no {name!r}", accepted=", ".join(known), hint=hint, source=COMMAND_LINE)


def _partial_entry(path: str, value: Any, entry: str) -> Problem:
    """Return the problem of setting a key of a new entry: OmegaConf creates a section only by merging a whole dict."""
    parent = entry.rpartition(".")[0]
    for name in reversed(path.removeprefix(f"{parent}.").split(".")):
        value = {name: value}
    hint = f"add the whole entry: '+{parent}={show(value)}'"
    return Problem(path, f"{entry} does not exist yet", hint=hint, source=COMMAND_LINE)


def values(override: Override) -> list[str]:
    """Return the values of a sweep as written on the command line; of an interval, its two ends."""
    if isinstance(override.value(), IntervalSweep):
        interval = override.value()
        assert isinstance(interval, IntervalSweep)
        return [str(interval.start), str(interval.end)]
    return list(override.sweep_string_iterator())


def expand(overrides: list[Override], *, product: bool) -> list[list[str]]:
    """Return the overrides of each job: all combinations, or each swept value once with the others at their first."""
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key, line = override.get_key_element(), override.input_line or ""
        choices[key] = [f"{key}={value}" for value in values(override)] if override.is_sweep_override() else [line]
    if product:
        return [list(job) for job in itertools.product(*choices.values())]
    first = {key: lines[0] for key, lines in choices.items()}
    swept = [list({**first, key: line}.values()) for key, lines in choices.items() for line in lines[1:]]
    return [list(first.values()), *swept]


# Keys of Hydra that maxhydra replaces: the value that has no effect, and what to set instead.
REPLACED_KEYS = {
    "hydra.run.dir": (".", "set the folder of the run with run.outputs and run.name"),
    "hydra.sweep.subdir": (None, "jobs are named by their swept values; set the folder of the sweep with run.name"),
    "hydra.job.chdir": (False, "runs stay in the folder of the command; set their files with run.outputs"),
    "hydra.output_subdir": (None, "config.yaml and log.txt are in the folder of the run"),
}


def replaced_key_problem(override: Override) -> Problem | None:
    """Return the problem of a key of Hydra that would have no effect."""
    key = override.key_or_group
    if key not in REPLACED_KEYS or override.is_sweep_override():
        return None
    unused, hint = REPLACED_KEYS[key]
    if not override.is_delete() and override.value() == unused:
        return None
    return Problem(key, "is not used by maxhydra", value=override.value(), hint=hint, source=COMMAND_LINE)


def sweep_problem(override: Override) -> Problem:
    """Return the problem of several values for a single run."""
    value = override.get_value_string()
    hint = f"add -m to sweep over the values, or write a list: {override.key_or_group}=[{value}]"
    return Problem(override.key_or_group, "several values for a single run", value, hint=hint, source=COMMAND_LINE)
