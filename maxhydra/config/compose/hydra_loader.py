"""Hydra's config loader with cached option files and with options whose values come from outside conf/.

Every import of `hydra._internal` is in this module, so that a new Hydra version is adapted to in one place. The
resolvers of YAML values, such as `${min:20,${train.steps}}`, are registered here.

`model=from_hf` is an option with a source: its values are read from the Hugging Face folder in `model.path`. They are
merged right after the option's own file, so later option files and the command line override them.
"""

import copy
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Self

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override

from maxhydra.config.compose.overrides import parse
from maxhydra.config.compose.provenance import COMMAND_LINE, read_yaml
from maxhydra.config.declare import Options
from maxhydra.config.errors import ConfigError, Problem, did_you_mean, options_shown
from maxhydra.config.migrations import renamed_option
from maxhydra.config.option_types import nested, option_types, schema_node, set_section_type
from maxhydra.config.registry import OPTION_SOURCES

# Characters in the name of a job's folder, and digits of a number in it that someone may have written.
LONGEST, MAX_DIGITS = 100, 6


def sweep_folder(outputs: str, name: str | None) -> str:
    """Return the folder of a sweep's jobs, named after `run.name` or, without one, the current time."""
    return f"{outputs}/{name or time.strftime('sweep-%Y%m%d-%H%M%S')}"


def job_folder(number: int, overrides: ListConfig | list[str], constant: ListConfig | list[str]) -> str:
    """Return a job's folder name, its number and swept values: `3_learning_rate=0.01,num_layers=2`.

    Names over LONGEST characters are cut and end in a hash, because file systems limit the length of a name.
    """
    pairs = [line.lstrip("+").partition("=")[::2] for line in overrides]
    swept = [(key, value) for key, value in pairs if key.partition("@")[0] not in constant]
    short = [re.split(r"[./]", key)[-1] for key, _ in swept]
    names = [name if short.count(name) == 1 else key for name, (key, _) in zip(short, swept, strict=True)]
    label = ",".join(f"{name}={_short_number(value)}" for name, (_, value) in zip(names, swept, strict=True))
    safe = re.sub(r"[^-\w.=,+]", "_", label)
    folder = f"{number}_{safe}" if safe else str(number)
    if len(folder) <= LONGEST:
        return folder
    return f"{folder[: LONGEST - 9]}_{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def _short_number(value: str) -> str:
    """A sampled value such as 0.004430375245218269 with three significant digits; others as they were written."""
    digits = re.fullmatch(r"-?([0-9]+\.[0-9]*)(?:e[-+]?[0-9]+)?", value)
    is_long = digits is not None and len(digits[1].replace(".", "").strip("0")) > MAX_DIGITS
    return f"{float(value):.3g}" if is_long else value


def register() -> None:
    """Register the resolvers. The sweep folder is cached, so that all jobs of a sweep get the same time."""
    OmegaConf.register_new_resolver("min", lambda *values: min(values), replace=True)
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


__all__ = ["BASIC_LAUNCHER", "BASIC_SWEEPER", "DefaultsList", "Groups", "Hydra", "Loader", "create_config_search_path"]

BASIC_LAUNCHER = f"{BasicLauncher.__module__}.{BasicLauncher.__qualname__}"
BASIC_SWEEPER = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
FOLDER_KEY = "model.path"
ROOT_SCHEMA = "schema/config"
MODEL, RECIPE, PACKAGED = "model", "recipe", "maxhydra.conf"
FOLDER_OPTIONS = ("from_hf", "from_hf_vision", "from_hf_audio", "from_hf_media", "from_hf_speech")


def source_values(folder: str | None, option: str) -> dict[str, Any]:
    """Return the config values that an option's registered source reads from a folder; empty for other options."""
    if folder is None or option not in OPTION_SOURCES:
        return {}
    return OPTION_SOURCES[option](FOLDER_KEY, folder)


def reads_folder(choices: dict[str, str]) -> bool:
    """Return whether the chosen model option takes its values from `model.path`."""
    return choices.get("model") in FOLDER_OPTIONS


def unused_folder(folder: str | None, choices: dict[str, str]) -> list[Problem]:
    """Return the problem of a `model.path` that the chosen model option ignores."""
    if folder is None or reads_folder(choices):
        return []
    return [Problem(FOLDER_KEY, "is not used by this model", value=folder, hint="choose model=from_hf")]


class Groups:
    """Config groups that Hydra sees, and their options."""

    def __init__(self, repository: ConfigRepository):
        self._repository = repository
        self._options: dict[str, list[str]] = {}

    def options(self, group: str) -> list[str]:
        if group not in self._options:
            self._options[group] = self._repository.get_group_options(group, ObjectType.CONFIG)
        return self._options[group]

    def is_choice(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, rather than setting a value."""
        return bool(self.options(override.key_or_group)) and not isinstance(override.value(), dict)

    def all(self, parent: str = "") -> Iterator[str]:
        for name in self._repository.get_group_options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            if self.options(group):
                yield group
            yield from self.all(group)

    def choice_problem(self, override: Override) -> Problem | None:
        """Return the problem of choosing an option that does not exist."""
        group, value, options = override.key_or_group, override.value(), self.options(override.key_or_group)
        if override.is_delete():
            return None
        if value is None:
            hint = f"remove the group with ~{group}"
            return Problem(group, "null is not an option", None, options_shown(group, options), hint, COMMAND_LINE)
        for option in value if isinstance(value, list) else [value]:
            if option not in options:
                hint = renamed_option(group, option) or did_you_mean(str(option), options)
                accepted = options_shown(group, options, near=str(option))
                return Problem(group, "no such option", option, accepted, hint, COMMAND_LINE)
        return None

    def unknown(self, group: str, value: Any) -> Problem:
        """Return the problem of a group that does not exist."""
        known = [name for name in self.all() if not name.startswith(("hydra", "schema"))]
        return Problem(group, "no such group", value, ", ".join(known), did_you_mean(group, known), COMMAND_LINE)


def source_folder(scheme: str, path: str) -> Path:
    """Return the folder of a config source of scheme `file` or `pkg`."""
    return Path(str(resources.files(path))) if scheme == "pkg" else Path(path)


def source_file(scheme: str, path: str, name: str) -> Path:
    """Return the YAML file of an option in a config source."""
    return source_folder(scheme, path) / f"{name.removesuffix('.yaml')}.yaml"


class Repository(ConfigRepository):
    """Hydra's option files, each parsed once.

    Hydra parses a file several times per composition and deep-copies the whole repository at every query (35 ms).
    Cached results are never modified in place, so a copy can share them. A file is first read within the limits of
    `read_yaml`, which raises ConfigError where Hydra's parser would fail with a traceback or take hours.
    """

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self._loaded: dict[str, ConfigResult | None] = {}

    def inherited(self, name: str) -> str:
        """Return the recipe that a model of the user inherits: its own, or that of the model it is derived from.

        Models of the package have only their own recipes, so that commands of older runs compose as before.
        """
        group, _, option = name.partition("/")
        if group != RECIPE or self._find_object_source(name, ObjectType.CONFIG) is not None:
            return name
        source = self._find_object_source(f"{MODEL}/{option}", ObjectType.CONFIG)
        if source is None or source.path == PACKAGED or source.scheme() not in ("pkg", "file"):
            return name
        content = read_yaml(source_file(source.scheme(), source.path, f"{MODEL}/{option}")).plain
        parents = content.get("defaults", []) if isinstance(content, dict) else []
        found = (self.inherited(f"{RECIPE}/{parent}") for parent in parents if isinstance(parent, str))
        return next((recipe for recipe in found if self._find_object_source(recipe, ObjectType.CONFIG)), name)

    def load_config(self, config_path: str) -> ConfigResult | None:
        config_path = self.inherited(config_path)
        if config_path not in self._loaded:
            source = self._find_object_source(config_path, ObjectType.CONFIG)
            # Schemas have no file, and Hydra's own options need no check.
            is_file = source is not None and source.scheme() in ("pkg", "file")
            if source is not None and is_file and not source.path.startswith("hydra."):
                read_yaml(source_file(source.scheme(), source.path, config_path))
            self._loaded[config_path] = super().load_config(config_path)
        return self._loaded[config_path]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)


_create_interpolation_map = defaults_list._create_interpolation_map
_UNUSED_MAP = DictConfig({})


def _create_map_if_used(overrides: Any, defaults_list: list[InputDefault], self_added: bool) -> DictConfig:
    """Return the choices that entries of a defaults list such as `${model}_data` refer to, if it has such entries.

    Hydra builds this map for every option file and rarely reads it, which is a quarter of the time of a composition.
    """
    is_used = any(default.is_interpolation() for default in defaults_list if not default.is_self())
    return _create_interpolation_map(overrides, defaults_list, self_added) if is_used else _UNUSED_MAP


defaults_list._create_interpolation_map = _create_map_if_used


def _has_text_keys(values: Any) -> bool:
    items = values.items() if isinstance(values, dict) else ()
    return all(isinstance(key, str) and _has_text_keys(value) for key, value in items)


class Loader(ConfigLoaderImpl):
    """Hydra's loader, which adds the values of option sources and can return a config that was composed before.

    It can also take the merged option files from the caller, so that Hydra composes only its own section and applies
    the command line. Hydra merges 25 files one by one into a growing tree, which is most of the time of a composition.
    """

    repository: Repository
    _overrides: Sequence[Override] = ()
    _folder: str | None = None
    _composed: DictConfig | None = None
    _merged_files: DictConfig | None = None

    def __init__(self, config_search_path: ConfigSearchPath):
        super().__init__(config_search_path)
        self.repository = Repository(config_search_path)
        self._file_values: dict[tuple[str, str], Any] = {}
        self._types: dict[str, type] = {}

    def option_types(
        self, overrides: Sequence[Override], defaults: Sequence[ResultDefault]
    ) -> dict[str, type[Options] | Problem]:
        """Return the classes of sections that belong to objects of the user; see config/option_types.py."""
        files = [(default.package or "", self._plain_values(default.config_path or "")) for default in defaults]
        set_values = [override for override in overrides if not (override.is_delete() or override.is_sweep_override())]
        given = [(override.key_or_group, override.value()) for override in set_values]
        # A text at the root chooses an option: data=demo.
        given = [(key, value) for key, value in given if "." in key or isinstance(value, dict)]
        return option_types(nested(path, values) for path, values in [*files, *given])

    def folder(self, overrides: Sequence[Override], defaults: Sequence[ResultDefault]) -> str | None:
        """Return `model.path` from the command line, or else from the last option file that sets it."""
        given = [override for override in overrides if override.key_or_group == FOLDER_KEY and not override.is_delete()]
        folders = [override.value() for override in given] or [*self._folders_in_files(defaults)]
        return str(folders[-1]) if folders and folders[-1] is not None else None

    @contextmanager
    def reuse(self, composed: DictConfig) -> Iterator[None]:
        """Make Hydra run a config that was composed and validated before, instead of composing it a second time."""
        self._composed = composed
        try:
            yield
        finally:
            self._composed = None

    @contextmanager
    def use_files(self, merged: DictConfig | None) -> Iterator[None]:
        """Make Hydra use these values of all option files, without the command line; None: Hydra merges the files."""
        self._merged_files = merged
        try:
            yield
        finally:
            self._merged_files = None

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *flags: bool, **named: bool
    ) -> DictConfig:
        if self._composed is not None:
            return self._composed
        self._overrides = parse(overrides, self).overrides
        try:
            return super().load_configuration(config_name, overrides, run_mode, *flags, **named)
        except KeyError as error:
            # Hydra reads the variables of env_copy from os.environ without a check; errors of OmegaConf are subclasses.
            if type(error) is not KeyError or error.args[0] in os.environ:
                raise
            reason, hint = "names an environment variable that is not set", f"set it: export {error.args[0]}=..."
            raise ConfigError(Problem("hydra.job.env_copy", reason, value=error.args[0], hint=hint)) from None

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        self._folder = self.folder(self._overrides, defaults)
        types = self.option_types(self._overrides, defaults)
        self._types = {path: cls for path, cls in types.items() if not isinstance(cls, Problem)}
        if self._merged_files is not None:
            defaults = [default for default in defaults if self._sets_hydra(default)]
        composed: DictConfig = super()._compose_config_from_defaults_list(defaults, repo)
        if self._merged_files is not None:
            with flag_override(composed, "no_deepcopy_set_nodes", True):
                composed.merge_with(self._merged_files)
        return composed

    def _sets_hydra(self, default: ResultDefault) -> bool:
        """Return whether an option sets values of Hydra's own section."""
        name, package = default.config_path or "", default.package or ""
        if name.startswith("hydra/") or package.partition(".")[0] == "hydra":
            return True
        values = self._plain_values(name)
        return not package and isinstance(values, dict) and "hydra" in values

    def has_text_keys(self, default: ResultDefault) -> bool:
        """Return whether every key of an option file is text; Hydra rejects others, such as numbers, in most places."""
        return _has_text_keys(self._plain_values(default.config_path or ""))

    def _folders_in_files(self, defaults: Sequence[ResultDefault]) -> Iterator[Any]:
        section, _, name = FOLDER_KEY.partition(".")
        for default in defaults:
            key = {"": FOLDER_KEY, section: name}.get(default.package or "", "")
            if key and (value := self._value_in_file(default.config_path or "", key)) is not None:
                yield value

    def _value_in_file(self, name: str, key: str) -> Any:
        """Return the value of a key in an option file, or None if the file does not set it."""
        if (name, key) not in self._file_values:
            result = self.repository.load_config(name)
            is_option = result is not None and isinstance(result.config, DictConfig) and not result.is_schema_source
            self._file_values[name, key] = OmegaConf.select(result.config, key) if result and is_option else None
        return self._file_values[name, key]

    def _plain_values(self, name: str) -> Any:
        """Return the values of an option file; None for schemas and Hydra's own options."""
        if (name, "") not in self._file_values:
            result = None if name.startswith(("hydra/", "schema/")) else self.repository.load_config(name)
            values = None if result is None else OmegaConf.to_container(result.config, resolve=False)
            self._file_values[name, ""] = values
        return self._file_values[name, ""]

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        result: ConfigResult = super()._load_single_config(default, repo)
        if not default.package and self._merged_files is not None:
            result = copy.copy(result)
            assert isinstance(result.config, DictConfig)
            result.config = OmegaConf.masked_copy(result.config, "hydra")
        elif not default.package:
            # Hydra copies a config into its package; without a package it returns the cached object itself, which the
            # following merge would modify.
            result = copy.copy(result)
            result.config = copy.deepcopy(result.config)
        if default.config_path == ROOT_SCHEMA:
            for path, cls in self._types.items():
                assert isinstance(result.config, DictConfig)
                set_section_type(result.config, path, schema_node(cls))
        if values := source_values(self._folder, default.config_path or ""):
            merged = OmegaConf.merge(result.config, values)
            assert isinstance(merged, DictConfig)
            result.config = merged
        return result
