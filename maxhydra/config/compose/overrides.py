"""The command line's overrides: parsed, held against the groups, and expanded into the jobs of a sweep."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from maxhydra.config.compose.merge import ConfigMerge
from maxhydra.config.compose.provenance import COMMAND_LINE, locate
from maxhydra.config.errors import Problem, did_you_mean, options_shown, show
from maxhydra.config.migrations import renamed_option


@dataclasses.dataclass
class Parsed:
    """Overrides in the order given, and what could not be read."""

    overrides: list[Override]
    problems: list[Problem]


def parse(texts: list[str], loader: ConfigLoader | None) -> Parsed:
    """Each text on its own, so that one that cannot be read does not hide the others."""
    parser = OverridesParser.create(config_loader=loader)
    parsed = Parsed([], [])
    for text in texts:
        try:
            parsed.overrides.append(parser.parse_override(text))
        except HydraException as error:
            parsed.problems.append(_unreadable(text, error))
    return parsed


def _unreadable(text: str, error: HydraException) -> Problem:
    key, equals, value = text.partition("=")
    if not equals:
        return Problem(text, "is not an override", accepted="key=value, group=option or ~key", source=COMMAND_LINE)
    reason = f"cannot be read: {str(error).splitlines()[0]}"
    hint = f"put a value with special characters in two pairs of quotes: '{key}=\"{value}\"'"
    return Problem(key, reason, value=value, hint=hint, source=COMMAND_LINE)


def searchpath(texts: list[str]) -> list[str]:
    """Folders that `hydra.searchpath=[...]` adds."""
    given = parse([text for text in texts if text.startswith("hydra.searchpath=")], loader=None)
    values = (override.value() for override in given.overrides)
    return [str(place) for value in values if isinstance(value, list) for place in value]


class Groups:
    """The config groups that Hydra sees, and their options."""

    def __init__(self, repository: ConfigRepository):
        self._repository = repository
        self._options: dict[str, list[str]] = {}

    def options(self, group: str) -> list[str]:
        if group not in self._options:
            self._options[group] = self._repository.get_group_options(group, ObjectType.CONFIG)
        return self._options[group]

    def is_choice(self, override: Override) -> bool:
        """Whether an override picks an option of a group, and is not a value."""
        return bool(self.options(override.key_or_group)) and not isinstance(override.value(), dict)

    def all(self, parent: str = "") -> Iterator[str]:
        for name in self._repository.get_group_options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            if self.options(group):
                yield group
            yield from self.all(group)

    def choice_problem(self, override: Override) -> Problem | None:
        """A choice of an option that does not exist."""
        group, value, options = override.key_or_group, override.value(), self.options(override.key_or_group)
        if override.is_delete():
            return None
        if value is None:
            hint = f"~{group} takes the group out"
            return Problem(group, "is no option", None, options_shown(group, options), hint, COMMAND_LINE)
        for option in value if isinstance(value, list) else [value]:
            if option not in options:
                hint = renamed_option(group, option) or did_you_mean(str(option), options)
                accepted = options_shown(group, options, near=str(option))
                return Problem(group, "no such option", option, accepted, hint, COMMAND_LINE)
        return None

    def unknown(self, group: str, value: Any) -> Problem:
        """A group that does not exist."""
        known = [name for name in self.all() if not name.startswith(("hydra", "schema"))]
        return Problem(group, "no such group", value, ", ".join(known), did_you_mean(group, known), COMMAND_LINE)


def place_override(assembly: ConfigMerge, override: Override) -> None:
    """Apply an override that sets a value, or list why it cannot be."""
    problem = _undeletable(assembly, override) if override.is_delete() else _misplaced(assembly, override)
    if problem is not None:
        assembly.problems.append(problem)
    elif override.is_delete() and assembly.spec(override.key_or_group) is not None:
        assembly.remove(override.key_or_group)
    else:
        assembly.place(override.key_or_group, locate(override.value(), COMMAND_LINE))


def _undeletable(assembly: ConfigMerge, override: Override) -> Problem | None:
    """Only the names of a dict can be deleted."""
    path = override.key_or_group
    parent = assembly.spec(path.rpartition(".")[0])
    if assembly.spec(path) is None or parent is None:
        return None
    if parent.type is not dict:
        hint = f"set {path}=null or another value"
        return Problem(path, "is part of the schema and cannot be deleted", hint=hint, source=COMMAND_LINE)
    return absent(assembly, path, assembly.new_entry(path))


def _misplaced(assembly: ConfigMerge, override: Override) -> Problem | None:
    """A name that its dict does not have is added with a plus sign; what exists is set without."""
    path, value, adds = override.key_or_group, override.value(), override.is_add() or override.is_force_add()
    entries = [entry for leaf in _leaves(path, value) if (entry := assembly.new_entry(leaf))]
    if assembly.spec(path) is None:
        return None
    if entries and not adds:
        return absent(assembly, path, entries[0])
    spec = assembly.spec(entries[0]) if entries else None
    if spec is not None and spec.is_section and f"{path}.".startswith(f"{entries[0]}."):
        return _deep_entry(path, value, entries[0])
    if not entries and override.is_add() and not isinstance(value, (dict, list)):
        hint = f"drop the plus sign: {path}={show(value)}"
        return Problem(path, "exists already", value, hint=hint, source=COMMAND_LINE)
    return None


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    else:
        yield path


def absent(assembly: ConfigMerge, path: str, entry: str) -> Problem | None:
    """A path through a name that its dict does not have."""
    if not entry:
        return None
    parent, _, name = entry.rpartition(".")
    known = assembly.names(parent)
    hint = did_you_mean(name, known) or f"a plus sign adds one: +{path}=..."
    return Problem(path, f"{parent} has no {name!r}", accepted=", ".join(known), hint=hint, source=COMMAND_LINE)


def _deep_entry(path: str, value: Any, entry: str) -> Problem:
    """OmegaConf makes a new section only where it merges into the dict around it."""
    parent = entry.rpartition(".")[0]
    for name in reversed(path.removeprefix(f"{parent}.").split(".")):
        value = {name: value}
    hint = f"add the whole entry: '+{parent}={show(value)}'"
    return Problem(path, f"{entry} does not exist yet", hint=hint, source=COMMAND_LINE)


def values(override: Override) -> list[str]:
    """The values of a sweep as one would write them; of an interval, its ends."""
    if isinstance(override.value(), IntervalSweep):
        interval = override.value()
        assert isinstance(interval, IntervalSweep)
        return [str(interval.start), str(interval.end)]
    return list(override.sweep_string_iterator())


def expand(overrides: list[Override], *, product: bool) -> list[list[str]]:
    """The overrides of each job: all combinations, or each swept value once with the others at their first."""
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key, line = override.get_key_element(), override.input_line or ""
        choices[key] = [f"{key}={value}" for value in values(override)] if override.is_sweep_override() else [line]
    if product:
        return [list(job) for job in itertools.product(*choices.values())]
    first = {key: lines[0] for key, lines in choices.items()}
    swept = [list({**first, key: line}.values()) for key, lines in choices.items() for line in lines[1:]]
    return [list(first.values()), *swept]


def sweep_problem(override: Override) -> Problem:
    """Several values where one run is asked for."""
    value = override.get_value_string()
    hint = f"add -m to sweep over them, or write a list: {override.key_or_group}=[{value}]"
    return Problem(override.key_or_group, "several values for one run", value, hint=hint, source=COMMAND_LINE)
