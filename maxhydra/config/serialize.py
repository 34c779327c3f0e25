"""Configs as YAML and back, without Hydra: config.yaml of a run folder, job.yaml of a worker."""

import dataclasses
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from maxhydra.config.compose.merge import DEFAULT, ConfigMerge
from maxhydra.config.compose.provenance import SourcedValue, parse_yaml
from maxhydra.config.compose.validate import Validator
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.fields import walk
from maxhydra.config.migrations import RULES_PATH, migrate_config, migrate_value, migrated_entries
from maxhydra.config.option_types import option_types
from maxhydra.config.registry import task_schemas
from maxhydra.config.schema.config import Config
from maxhydra.config.yaml_files import dump_yaml
from maxhydra.record.atomic_io import NewerFormatError
from maxhydra.record.facts import FACTS, Facts, parse_facts
from maxhydra.record.redact import HIDDEN, redact_config, secret_paths, variables_in


def to_yaml(config: Config) -> str:
    """Return every value of a config as YAML."""
    return dump_yaml(_to_plain(config))


def to_stored_yaml(config: Config) -> str:
    """Return a config as YAML without secrets: `${oc.env:NAME}` for values of variables, *** for others."""
    return dump_yaml(stored_values(config))


def stored_values(config: Config) -> dict[str, Any]:
    """Return the plain values that `to_stored_yaml` writes."""
    values: dict[str, Any] = redact_config(_to_plain(config))
    return values


def to_job_yaml(config: Config) -> str:
    """Return a config as YAML from which another process can run it; raise ConfigError if it contains secrets."""
    if paths := list(secret_paths(_to_plain(config))):
        reason = "looks like a secret, which cannot be stored in the file of a job"
        hint = "pass it by a variable of the job's environment: {}='${{oc.env:NAME}}'"
        raise ConfigError(Problem(path, reason, hint=hint.format(path)) for path in paths)
    return to_stored_yaml(config)


def stored_secrets(config: Config) -> list[str]:
    """Return the dotted paths whose values `to_stored_yaml` replaces by ***."""
    return list(secret_paths(_to_plain(config)))


def _to_plain(value: Any) -> Any:
    """Return dataclasses as dicts and enums as names, as OmegaConf does in a hundred times the time."""
    if dataclasses.is_dataclass(value):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {_to_plain(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def from_yaml(text: str, source: str = "config.yaml", *, is_run: bool = False) -> Config:
    """Return the config that `to_yaml` wrote, validated; `source` is the file name in error messages.

    To run it, all variables that it refers to must be set, and all secrets known. To read the settings of another run
    (`is_run=False`), references to variables that are not set remain as text.
    """
    return _validate(_merge(text, source, is_run=is_run))


def with_overrides(config: Config, overrides: list[str]) -> Config:
    """Return the config with values changed by command line overrides, validated."""
    # Parsing overrides needs Hydra, which a worker that only reads its config does not import.
    from maxhydra.config.compose.overrides import apply_override, parse  # noqa: PLC0415

    merge = _merge(to_yaml(config), "config.yaml", is_run=True)
    parsed = parse(overrides, loader=None)
    merge.problems += parsed.problems
    for override in parsed.overrides:
        apply_override(merge, override)
    return _validate(merge)


def _merge(text: str, source: str, *, is_run: bool) -> ConfigMerge:
    """Merge the values of a config's YAML over the schema, with renamed keys under their current names."""
    content = _migrate_sourced(parse_yaml(text, source))
    if not isinstance(content.value, dict):
        raise ConfigError(Problem(source, "is not a config", accepted="a mapping of sections"))
    merge = ConfigMerge()
    if is_run:
        merge.problems += _hidden_values(content)
    else:
        content = _keep_unset_variables(content)
    task = content.value.get("task")
    name = task.value.get("name") if task is not None and isinstance(task.value, dict) else None
    if name is not None and name.value in task_schemas():
        merge.set_type("task", task_schemas()[name.value])
    types = option_types([content.plain])
    if not is_run:
        # A run can be read without the packages of its objects; a task that needs one reports it.
        unknown = {path for path, cls in types.items() if isinstance(cls, Problem)}
        types = {path: cls for path, cls in types.items() if path not in unknown}
        content = _without(content, unknown)
    merge.set_option_types(types)
    merge.set_value("", content)
    merge.check_required()
    for path, field in walk(Config):
        if field.spec.type is dict and "*" not in path:
            # `to_yaml` writes a dict completely, so a default entry that the text lacks was deleted.
            entries = content.at(path)
            for key in set(field.default) - set(entries.value if entries else {}):
                merge.remove(f"{path}.{key}")
    return merge


def _without(values: SourcedValue, paths: set[str], path: str = "") -> SourcedValue:
    """Return nested values without those at some paths."""
    if not paths or not isinstance(values.value, dict):
        return values
    entries = {(f"{path}.{key}" if path else key): (key, item) for key, item in values.value.items()}
    remaining = {key: _without(item, paths, here) for here, (key, item) in entries.items() if here not in paths}
    return SourcedValue(remaining, values.source)


def _validate(merge: ConfigMerge) -> Config:
    """Return the valid config; raise ConfigError with all problems at once if there are any."""
    validator = Validator(origin=lambda path: origin_to_show(merge.origin(path)), unsure=merge.unsure)
    config = validator.section(merge.config())
    if problems := [*merge.problems, *validator.problems]:
        raise ConfigError(problems)
    assert isinstance(config, Config)
    return config


def origin_to_show(origin: str) -> str:
    """Return where a value was set, or an empty string for a schema default."""
    return "" if origin == DEFAULT else origin


def _migrate_sourced(values: SourcedValue, path: str = "") -> SourcedValue:
    """Rename keys and options in values that know the line where each was written."""
    if not isinstance(values.value, dict):
        return SourcedValue(migrate_value(path, values.value), values.source)
    if path == RULES_PATH:
        rules = migrate_config({name: rule.value for name, rule in values.value.items()}, path)
        sources = {name: rule.source for name, rule in values.value.items()}
        return SourcedValue(
            {name: SourcedValue(rule, sources.get(name, values.source)) for name, rule in rules.items()}, values.source
        )
    entries = migrated_entries(values.value, path)
    return SourcedValue({key: _migrate_sourced(item, here) for here, key, item in entries}, values.source)


def _hidden_values(values: SourcedValue, path: str = "") -> Iterator[Problem]:
    """Yield the values that were redacted when the config was stored."""
    if isinstance(values.value, dict):
        for key, item in values.value.items():
            yield from _hidden_values(item, f"{path}.{key}" if path else key)
    elif HIDDEN in str(values.value):
        hint = f"start the run with its command again, best with {path}='${{oc.env:NAME}}'"
        yield Problem(path, "was a secret, whose value was not stored", values.value, hint=hint, source=values.source)


def _keep_unset_variables(values: SourcedValue) -> SourcedValue:
    """Escape `${oc.env:NAME}` of variables that are not set."""
    if isinstance(values.value, dict):
        return SourcedValue({key: _keep_unset_variables(item) for key, item in values.value.items()}, values.source)
    return SourcedValue(_escape_unset(values.value), values.source)


def _escape_unset(value: Any) -> Any:
    if isinstance(value, list):
        return [_escape_unset(item) for item in value]
    if not isinstance(value, str) or all(name in os.environ for name in variables_in(value)):
        return value
    return value.replace("${", "\\${")


def read_run_facts(folder: Path) -> Facts:
    """The facts in run.json of a run folder; ConfigError if it is damaged or was written by a later version."""
    path = folder / FACTS
    try:
        return parse_facts(path.read_bytes())
    except NewerFormatError as error:
        raise ConfigError(Problem(str(path), str(error))) from None
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        hint = "restore it from a copy, or resume the run, which rebuilds what it can"
        raise ConfigError(Problem(str(path), reason, hint=hint)) from None
