"""Errors of Hydra, OmegaConf and YAML as config problems."""

import re
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from maxhydra.config.errors import Problem, did_you_mean, options_shown
from maxhydra.config.migrations import renamed_option
from maxhydra.config.registry import groups
from maxhydra.config.yaml_files import display_path

# Raised while composing. Hydra raises ValueError if the value of a group is not a name.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)


def problem_of(error: Exception) -> Problem:
    """Return the problem behind an error, with the key or the file and line if the error has them."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, yaml.MarkedYAMLError):
        return _malformed_yaml(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        path = cause.full_key or _path(str(error))
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(cause.parent_node, DictConfig):
            known = [str(name) for name in cause.parent_node if name != "_target_"]
            return Problem(path, "no such key", accepted=", ".join(known), hint=did_you_mean(str(cause.key), known))
        return Problem(path or "the config", str(cause.msg or cause).splitlines()[0])
    return _composition(str(error))


def _missing_option(error: MissingConfigException) -> Problem:
    """Return the problem of an option in a defaults list: `In 'experiment/x': Could not find 'model/y'`."""
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = [name for name in error.options or [] if isinstance(name, str)]
    if not group:
        return Problem(option, "no such config file", hint=f"the config folders have no {option}.yaml")
    accepted = options_shown(group, options, near=option)
    hint = renamed_option(group, option) or did_you_mean(option, options)
    return Problem(group, "no such option", option, accepted, hint)


def _malformed_yaml(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = f"{display_path(Path(mark.name))}:{mark.line + 1}" if mark is not None else "a YAML file"
    return Problem(where, f"is not YAML: {error.problem or error.context}")


def _composition(text: str) -> Problem:
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1]
        advice = re.search(r"use (\+\S+)", text)
        hint = f"add it with {advice[1]}" if advice else did_you_mean(key, groups())
        return Problem(key, "is not in the defaults list, so it cannot be overridden", hint=hint)
    if match := re.search(r"Multiple values for ([\w/@.]+?)\. |([\w/@.]+) appears more than once", text):
        key = match[1] or match[2]
        hint = f"to replace a choice, write {key}=OPTION on the command line or `override /{key}: OPTION` in a file"
        return Problem(key, "is chosen twice", hint=hint)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Problem(_path(text) or "the config", lines[0] if lines else "cannot be composed")


def _path(text: str) -> str:
    match = re.search(r"override \+*([\w./@]+)", text)
    return match[1] if match else ""
