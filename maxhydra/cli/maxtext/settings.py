"""The keys of a MaxText config: a file, the files of its base_config, and key=value arguments."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from maxhydra.cli.maxtext.table import Row, families, rows
from maxhydra.config.errors import UNSET, ConfigError, Problem, did_you_mean
from maxhydra.config.options import model_options
from maxhydra.config.yaml_files import FAST_LOADER, read_yaml_text

# The file of MaxText's defaults, which the table replaces. Its users did not write its keys.
DEFAULTS_FILE = "base.yml"
# Sections that group keys of reinforcement learning and fine-tuning; the keys in them are unique without it.
SECTIONS = ("rl", "dpo", "lora", "cluster", "dataset", "reward", "special_tokens", "evaluation", "vllm")
# Section of distillation with keys of the student, which is the model of the run.
STUDENT = "student_overrides"
MAX_CHAIN = 20
COMMAND_LINE = "the command line"


class Settings:
    """Values by key. A key that is not given, or is given its default, has MaxText's default."""

    def __init__(self, values: dict[str, Any], present: set[str]):
        self.values, self.present = values, present

    def __getitem__(self, key: str) -> Any:
        value = self.values.get(key, rows()[key].default)
        return None if value is UNSET else value

    def names(self, *keys: str) -> bool:
        """Return whether one of the keys is in the config, with whatever value."""
        return not self.present.isdisjoint(keys)

    def given(self, *keys: str) -> bool:
        """Return whether one of the keys has another value than MaxText's default."""
        return any(key in self.values for key in keys)

    def number(self, key: str) -> float:
        """Return a value that must be a number; ConfigError otherwise."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(Problem(key, "is not a number", value=value, accepted="a number"))
        return value

    def count(self, key: str) -> int:
        """Return a value that must be a whole number; ConfigError otherwise."""
        value = self.number(key)
        if value != int(value):
            raise ConfigError(Problem(key, "is not a whole number", value=value, accepted="an integer"))
        return int(value)


def read_settings(path: Path, arguments: Iterable[str]) -> tuple[Settings, list[str]]:
    """Return the settings of a config file and arguments, and the keys of base.yml that the table does not know."""
    merged: dict[str, tuple[Any, str]] = {}
    unknown: list[str] = []
    for file, values in _chain(path):
        if file.name == DEFAULTS_FILE:
            unknown += [key for key in values if key not in rows()]
            values = {key: value for key, value in values.items() if key in rows() and rows()[key].default is not UNSET}
        merged |= {key: (value, str(file)) for key, value in values.items()}
    merged |= {key: (value, COMMAND_LINE) for key, value in _parse(arguments)}
    merged = _model_file(merged, path) | merged
    if problems := [_unknown(key, source) for key, (_, source) in merged.items() if key not in rows()]:
        raise ConfigError(problems)
    cast = {key: _cast(key, value, rows()[key], source) for key, (value, source) in merged.items()}
    values = {key: value for key, value in cast.items() if not _is_default(value, rows()[key])}
    present = {key for key, (_, source) in merged.items() if Path(source).name != DEFAULTS_FILE}
    return Settings(values, present), unknown


def _chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the files from the base to the config itself, each with its flat values."""
    files: list[tuple[Path, dict[str, Any]]] = []
    while len(files) < MAX_CHAIN:
        values = _read(path)
        base = values.pop("base_config", None)
        files.insert(0, (path, values))
        if not base:
            return files
        found = _find(path.parent, str(base))
        if found is None and Path(str(base)).name == DEFAULTS_FILE:
            return files
        if found is None:
            hint = "copy it next to the config"
            raise ConfigError(Problem("base_config", "no such file", value=base, hint=hint, source=str(path)))
        path = found
    raise ConfigError(Problem("base_config", f"has more than {MAX_CHAIN} files, or refers to itself", source=str(path)))


def _find(folder: Path, name: str) -> Path | None:
    """Return a file relative to a folder or to one of the folders above it, as MaxText's own files name each other."""
    folders = [folder, *folder.absolute().parents]
    found = (candidate / part for candidate in folders for part in (name, Path(name).name))
    return next((path for path in found if path.is_file()), None)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(Problem("CONFIG", "no such file", value=str(path), hint="pass a YAML file of MaxText"))
    try:
        content = yaml.load(read_yaml_text(path), Loader=FAST_LOADER)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(Problem(str(path), f"is not valid YAML: {reason}")) from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(Problem(str(path), "is not a mapping of keys to values"))
    return dict(_flat({str(key): value for key, value in (content or {}).items()}))


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in (*SECTIONS, STUDENT) and isinstance(value, dict):
            yield from value.items()
        if key not in SECTIONS:
            yield key, value


def _parse(arguments: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator:
            accepted = "key=value"
            raise ConfigError(Problem(argument, "is not an override", accepted=accepted, source=COMMAND_LINE))
        section, _, name = key.partition(".")
        try:
            value = yaml.load(text, Loader=FAST_LOADER)
        except yaml.YAMLError:
            value = text
        yield (name if section in SECTIONS and name else key), value


def _model_file(merged: dict[str, tuple[Any, str]], path: Path) -> dict[str, tuple[Any, str]]:
    """Return the keys of models/NAME.yml near the config, if NAME is not an option here."""
    name = str(merged.get("model_name", ("default", ""))[0])
    if name == "default" or name in model_options():
        return {}
    found = _find(path.parent, f"models/{name}.yml")
    if found is not None:
        return {key: (value, str(found)) for key, value in _read(found).items()}
    if "base_emb_dim" in merged:
        return {}
    near = did_you_mean(name, model_options()) or "`maxhydra models` lists all"
    hint = f"{near}; a model of yours needs models/{name}.yml next to the config, or the keys base_*"
    raise ConfigError(Problem("model_name", "is not a model option", value=name, hint=hint))


def _unknown(key: str, source: str) -> Problem:
    hint = did_you_mean(key, rows()) or "docs/maxtext.md lists all keys"
    return Problem(key, "is not a key of MaxText", hint=hint, source=source)


def _cast(key: str, value: Any, row: Row, source: str) -> Any:
    """Return a value with the type of the default: YAML reads 3e-5 as text, and MaxText writes None for null."""
    if isinstance(value, str) and value in ("None", "none", "null") and not isinstance(row.default, str):
        return None
    is_number = isinstance(row.default, int | float) and not isinstance(row.default, bool)
    if is_number and isinstance(value, str):
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            raise ConfigError(Problem(key, "is not a number", value=value, source=source)) from None
        return int(number) if number == int(number) and isinstance(row.default, int) else number
    if isinstance(row.default, bool) and not isinstance(value, bool | None):
        raise ConfigError(Problem(key, "is not a boolean", value=value, accepted="true, false", source=source))
    if key == "decoder_block" and value not in families():
        accepted = ", ".join(families())
        raise ConfigError(Problem(key, "is not implemented", value=value, accepted=accepted, source=source))
    return value


def _is_default(value: Any, row: Row) -> bool:
    """Return whether a value is the default; an empty text and null both mean that nothing is set."""
    return value == row.default or (value in (None, "") and row.default in (None, ""))
