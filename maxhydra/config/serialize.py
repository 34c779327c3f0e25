"""A config as YAML and back, without Hydra: what a run's folder holds, and what a worker is handed."""

from omegaconf import OmegaConf

from maxhydra.config.compose.merge import DEFAULT, ConfigMerge
from maxhydra.config.compose.provenance import parse_yaml
from maxhydra.config.compose.validate import Validator
from maxhydra.config.errors import ConfigError
from maxhydra.config.fields import walk
from maxhydra.config.migrations import migrate_sourced
from maxhydra.config.registry import task_schemas
from maxhydra.config.schema.config import Config


def to_yaml(config: Config) -> str:
    """Every value of a config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str, source: str = "config.yaml") -> Config:
    """The config that `to_yaml` wrote, checked as any other; `source` is what its lines are called in problems."""
    return built(assembled(text, source))


def assembled(text: str, source: str) -> ConfigMerge:
    """What a config's text places, before it is checked."""
    content = migrate_sourced(parse_yaml(text, source))
    assembly = ConfigMerge()
    task = content.value.get("task")
    name = task.value.get("name") if task is not None and isinstance(task.value, dict) else None
    if name is not None and name.value in task_schemas():
        assembly.set_type("task", task_schemas()[name.value])
    assembly.place("", content)
    assembly.demand()
    for path, field in walk(Config):
        if field.spec.type is dict and "*" not in path:
            # A dict is written whole: a name that is not there was deleted.
            written = content.at(path)
            for key in set(field.default) - set(written.value if written else {}):
                assembly.remove(f"{path}.{key}")
    return assembly


def built(assembly: ConfigMerge) -> Config:
    """The valid config; all problems at once where there are any."""
    builder = Validator(origin=lambda path: origin_to_show(assembly.origin(path)), unsure=assembly.unsure)
    config = builder.section(assembly.config())
    if problems := [*assembly.problems, *builder.problems]:
        raise ConfigError(problems)
    assert isinstance(config, Config)
    return config


def origin_to_show(origin: str) -> str:
    """Where a value was written; nothing where nobody wrote it."""
    return "" if origin == DEFAULT else origin
