"""The settings that won, as an experiment: what the command chose and set, and what the search changed."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.compose.overrides import parse
from maxhydra.config.registry import GLOBAL, defaults
from maxhydra.config.serialize import to_yaml
from maxhydra.record import scrub_text

# What belongs to the search and not to what is tuned.
OWN = ("task", "run", "objective", "hydra")
OVERLAYS = ("experiment", "debug", "local", "sweep")


def given_keys(overrides: Iterable[str]) -> list[str]:
    """Keys of the config that the command set, those of the search left out; ConfigError where YAML cannot say it."""
    parsed = parse(list(overrides), loader=None).overrides
    kept = [override for override in parsed if override.key_or_group.split(".")[0].split("/")[0] not in OWN]
    if deleted := [override.input_line for override in kept if override.is_delete()]:
        hint = "an experiment cannot take a key away; make an option of your own without it"
        raise ConfigError(Problem(str(deleted[0]), "cannot be written as an experiment", hint=hint))
    return [override.key_or_group for override in kept if not _is_choice(override.key_or_group, override.value())]


def experiment(
    before: Config, tuned: Config, *, choices: Mapping[str, str], overrides: Iterable[str], comments: Iterable[str]
) -> str:
    """The text of an experiment that composes to the tuned config."""
    had, has = _plain(before), _plain(tuned)
    keys = [*given_keys(overrides), *_changed(had, has)]
    content: dict[str, Any] = {}
    for key in dict.fromkeys(keys):
        _place(content, key.split("."), OmegaConf.select(OmegaConf.create(has), key))
    head = [f"# {GLOBAL}", *(f"# {scrub_text(line)}".rstrip() for line in comments)]
    written = yaml.safe_dump(_without_containers(content), sort_keys=False, default_flow_style=False, width=10_000)
    return "\n".join([*head, *_defaults_list(choices), written])


def _is_choice(key: str, value: object) -> bool:
    """Whether an override picks an option: keys of groups are words, with slashes perhaps, and no section's key."""
    return key in dict(defaults()) or "/" in key or (key in OVERLAYS and isinstance(value, str))


def _defaults_list(choices: Mapping[str, str]) -> list[str]:
    """Lines for options other than those of config.yaml; an experiment that was chosen comes first, and stays below."""
    usual = dict(defaults())
    chosen = {group: option for group, option in choices.items() if group not in ("task", "recipe", *OVERLAYS)}
    lines = [f"  - /experiment/{choices['experiment']}"] if "experiment" in choices else []
    lines += [f"  - override /{group}: {option}" for group, option in chosen.items() if usual.get(group) != option]
    return ["defaults:", *lines] if lines else []


def _plain(config: Config) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.create(to_yaml(config)))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items() if key not in OWN}


def _changed(had: Mapping[str, Any], has: Mapping[str, Any], path: str = "") -> list[str]:
    """Paths of values that differ, lists as a whole."""
    found: list[str] = []
    for key, value in has.items():
        here, before = f"{path}{key}", had.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            found += _changed(before, value, f"{here}.")
        elif value != before:
            found.append(here)
    return found


def _place(content: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        content = content.setdefault(name, {})
    content[path[-1]] = value


def _without_containers(content: dict[str, Any]) -> Any:
    """OmegaConf's containers as plain ones, which YAML knows."""
    return OmegaConf.to_container(OmegaConf.create(content))
