"""A config with single values changed. Apart from written.py: it reads overrides, for which Hydra is needed."""

from maxhydra.config.compose.overrides import parse, place_override
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import assembled, built, to_yaml


def with_overrides(config: Config, overrides: list[str]) -> Config:
    """The config with single values changed, by overrides as on the command line, and checked as any other."""
    assembly = assembled(to_yaml(config), "config.yaml")
    parsed = parse(overrides, loader=None)
    assembly.problems += parsed.problems
    for override in parsed.overrides:
        place_override(assembly, override)
    return built(assembly)
