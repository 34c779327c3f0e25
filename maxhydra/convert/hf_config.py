"""The model that a Hugging Face folder's config.json states, as our config. No jax: a config is composed with it."""

import json
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from maxhydra.config import ConfigError, Problem
from maxhydra.config.options import model_from
from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, all_tables

CONFIG = "config.json"
WORDS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def stated_model(key: str, location: str) -> dict[str, Any]:
    """The section `model` that a folder states."""
    folder = Path(location).expanduser()
    if not is_hf_folder(folder):
        reason = f"has no {CONFIG}" if folder.is_dir() else "is not a folder"
        raise ConfigError(Problem(key, reason, value=location, accepted="a Hugging Face folder"))
    settings = read_settings(key, location, folder)
    values = values_of(key, location, table_of(key, location, settings), settings)
    model_of(key, location, values)
    return {"model": values}


def stated_run(location: str) -> dict[str, Any]:
    """What else of a run a folder states: its tokenizer, where it has one."""
    folder = Path(location).expanduser()
    has_words = any((folder / name).is_file() for name in WORDS)
    return {"data": {"tokenizer": {"kind": "hf", "path": location}}} if has_words else {}


def is_hf_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_settings(key: str, location: str, folder: Path) -> Settings:
    """What config.json holds. `key` is the config field that names the folder as `location`."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(key, f"{CONFIG} cannot be read: {error}", value=location)) from None
    if not isinstance(settings, dict):
        raise ConfigError(Problem(key, f"{CONFIG} holds no settings", value=location))
    return settings


def table_of(key: str, location: str, settings: Settings) -> Table:
    """The table of a model_type."""
    known = {name: table for table in all_tables() for name in table.hf_types}
    model_type = settings.get("model_type")
    if model_type not in known:
        raise no_table(key, location, f"folder of model_type {model_type}", list(known))
    return known[model_type]


def values_of(key: str, location: str, table: Table, settings: Settings) -> dict[str, Any]:
    """Plain values of our model config."""
    try:
        return table.to_model(settings)
    except KeyError as error:
        reason = f"{CONFIG} lacks {error.args[0]}"
    except UnsupportedError as error:
        reason = f"{CONFIG} has {error}"
    except (TypeError, ValueError, AttributeError) as error:
        reason = f"{CONFIG} is not as its model_type has it: {error}"
    raise ConfigError(Problem(key, reason, value=location))


def model_of(key: str, location: str, values: dict[str, Any]) -> config.Model:
    """The model config of plain values; what does not fit the schema is told of the location."""
    try:
        return model_from(values, source=location)
    except OmegaConfBaseException as error:
        reason = f"{CONFIG} gives a model that cannot be: {str(error).splitlines()[0]}"
        raise ConfigError(Problem(key, reason, value=location)) from None


def no_table(key: str, location: str, what: str, known: list[str]) -> ConfigError:
    """A family without a table."""
    hint = "a family is a table in maxhydra/convert/tables"
    return ConfigError(Problem(key, f"is a {what}", value=location, accepted=", ".join(sorted(known)), hint=hint))
