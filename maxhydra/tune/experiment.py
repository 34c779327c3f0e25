"""Writes the best settings as an experiment: the choices and overrides of the command, and the tuned values."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.compose.overrides import parse
from maxhydra.config.registry import GLOBAL, defaults
from maxhydra.config.serialize import to_stored_yaml
from maxhydra.record import redact_text

# Sections that belong to the search and not to the tuned config.
SEARCH_SECTIONS = ("task", "run", "objective", "hydra")
OVERLAYS = ("experiment", "debug", "local", "sweep")


def given_keys(overrides: Iterable[str]) -> list[str]:
    """Keys of the tuned config that the command set; ConfigError if an experiment cannot express an override."""
    parsed = parse(list(overrides), loader=None).overrides
    relevant = [item for item in parsed if item.key_or_group.split(".")[0].split("/")[0] not in SEARCH_SECTIONS]
    if deleted := [override.input_line for override in relevant if override.is_delete()]:
        hint = "an experiment cannot delete a key; write an option without it"
        raise ConfigError(Problem(str(deleted[0]), "cannot be written as an experiment", hint=hint))
    return [override.key_or_group for override in relevant if not _is_choice(override.key_or_group, override.value())]


def experiment(
    before: Config, tuned: Config, *, choices: Mapping[str, str], overrides: Iterable[str], comments: Iterable[str]
) -> str:
    """The text of an experiment that composes to the tuned config."""
    old, new = _plain(before), _plain(tuned)
    keys = [*given_keys(overrides), *_changed_paths(old, new)]
    content: dict[str, Any] = {}
    for key in dict.fromkeys(keys):
        _set_path(content, key.split("."), OmegaConf.select(OmegaConf.create(new), key))
    header = [f"# {GLOBAL}", *(f"# {redact_text(line)}".rstrip() for line in comments)]
    values = yaml.safe_dump(_to_plain(content), sort_keys=False, default_flow_style=False, width=10_000)
    return "\n".join([*header, *_defaults_list(choices), values])


def _is_choice(key: str, value: object) -> bool:
    """Whether an override chooses an option of a group, rather than setting a key of a section."""
    return key in dict(defaults()) or "/" in key or (key in OVERLAYS and isinstance(value, str))


def _defaults_list(choices: Mapping[str, str]) -> list[str]:
    """Defaults list of the options that differ from config.yaml; a chosen experiment comes first, to be overridden."""
    default_options = dict(defaults())
    chosen = {group: option for group, option in choices.items() if group not in ("task", "recipe", *OVERLAYS)}
    lines = [f"  - /experiment/{choices['experiment']}"] if "experiment" in choices else []
    changed = {group: option for group, option in chosen.items() if default_options.get(group) != option}
    lines += [f"  - override /{group}: {option}" for group, option in changed.items()]
    return ["defaults:", *lines] if lines else []


def _plain(config: Config) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.create(to_stored_yaml(config)))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items() if key not in SEARCH_SECTIONS}


def _changed_paths(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of values that differ; lists are compared as a whole."""
    paths: list[str] = []
    for key, value in new.items():
        path, old_value = f"{prefix}{key}", old.get(key)
        if isinstance(value, dict) and isinstance(old_value, dict):
            paths += _changed_paths(old_value, value, f"{path}.")
        elif value != old_value:
            paths.append(path)
    return paths


def _set_path(content: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        content = content.setdefault(name, {})
    content[path[-1]] = value


def _to_plain(content: dict[str, Any]) -> Any:
    """Convert OmegaConf containers to dicts and lists, which PyYAML can write."""
    return OmegaConf.to_container(OmegaConf.create(content))
