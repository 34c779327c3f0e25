"""Typed config: schema, composition, validation and errors. Does not import jax."""

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.config import Config

__all__ = ["Config", "ConfigError", "Problem"]
