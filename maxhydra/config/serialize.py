"""Configs as YAML and back, without Hydra: config.yaml of a run folder, job.yaml of a worker."""

from omegaconf import OmegaConf

from maxhydra.config.compose.merge import DEFAULT, ConfigMerge
from maxhydra.config.compose.provenance import SourcedValue, parse_yaml
from maxhydra.config.compose.validate import Validator
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.fields import walk
from maxhydra.config.migrations import migrate_value, migrated_entries
from maxhydra.config.registry import task_schemas
from maxhydra.config.schema.config import Config


def to_yaml(config: Config) -> str:
    """Return every value of a config as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str, source: str = "config.yaml") -> Config:
    """Return the config that `to_yaml` wrote, validated; `source` is the file name in error messages."""
    return _validate(_merge(text, source))


def with_overrides(config: Config, overrides: list[str]) -> Config:
    """Return the config with values changed by command line overrides, validated."""
    # Parsing overrides needs Hydra, which a worker that only reads its config does not import.
    from maxhydra.config.compose.overrides import apply_override, parse  # noqa: PLC0415

    merge = _merge(to_yaml(config), "config.yaml")
    parsed = parse(overrides, loader=None)
    merge.problems += parsed.problems
    for override in parsed.overrides:
        apply_override(merge, override)
    return _validate(merge)


def _merge(text: str, source: str) -> ConfigMerge:
    """Merge the values of a config's YAML over the schema, with renamed keys under their current names."""
    content = _migrate_sourced(parse_yaml(text, source))
    if not isinstance(content.value, dict):
        raise ConfigError(Problem(source, "is not a config", accepted="a mapping of sections"))
    merge = ConfigMerge()
    task = content.value.get("task")
    name = task.value.get("name") if task is not None and isinstance(task.value, dict) else None
    if name is not None and name.value in task_schemas():
        merge.set_type("task", task_schemas()[name.value])
    merge.set_value("", content)
    merge.check_required()
    for path, field in walk(Config):
        if field.spec.type is dict and "*" not in path:
            # `to_yaml` writes a dict completely, so a default entry that the text lacks was deleted.
            entries = content.at(path)
            for key in set(field.default) - set(entries.value if entries else {}):
                merge.remove(f"{path}.{key}")
    return merge


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
    entries = migrated_entries(values.value, path)
    return SourcedValue({key: _migrate_sourced(item, here) for here, key, item in entries}, values.source)
