"""The typed config: schema, validation and errors. No jax here."""

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.config import Config

__all__ = ["Config", "ConfigError", "Problem"]
