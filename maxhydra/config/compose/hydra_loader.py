"""Options whose values a folder states: model=from_hf, with the folder in model.path.

What the folder states stands where the option's own values do: over what comes before it, and under the command line.
"""

import copy
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maxhydra.config.compose.overrides import parse
from maxhydra.config.errors import Problem

KEY = "model.path"
OPTION = "model/from_hf"


def stated(folder: str | None, option: str) -> dict[str, Any]:
    """Values of the whole config that a folder states for an option file, by its name; nothing for most."""
    if folder is None or option not in (OPTION, OPTION.replace("model", "recipe")):
        return {}
    # The families stand above the config, which knows them by name alone, as it does tasks.
    derive = importlib.import_module("maxhydra.convert.hf_config")
    values: dict[str, Any] = derive.stated_model(KEY, folder) if option == OPTION else derive.stated_run(folder)
    return values


def is_chosen(choices: dict[str, str]) -> bool:
    return f"model/{choices.get('model')}" == OPTION


def folder_problems(folder: str | None, choices: dict[str, str]) -> list[Problem]:
    """A folder that nothing would read."""
    if folder is None or is_chosen(choices):
        return []
    return [Problem(KEY, "is not used by this model", value=folder, hint="choose model=from_hf")]


class Repository(ConfigRepository):
    """Hydra's option files, each read once. Hydra reads them several times, and copies all at every question in 35 ms.

    They are read, and replaced as a whole, so that a copy can share them.
    """

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self._loaded: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._loaded:
            self._loaded[config_path] = super().load_config(config_path)
        return self._loaded[config_path]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)


class Loader(ConfigLoaderImpl):
    """Hydra's loader, to whose option files a folder's values are added."""

    _overrides: Sequence[Override] = ()
    _folder: str | None = None

    def __init__(self, config_search_path: ConfigSearchPath):
        super().__init__(config_search_path)
        self.repository = Repository(config_search_path)
        self._named: dict[tuple[str, str], Any] = {}

    def folder(self, overrides: Sequence[Override], defaults: Sequence[ResultDefault]) -> str | None:
        """The folder that the command line names, or else the last option file that names one."""
        given = [override for override in overrides if override.key_or_group == KEY and not override.is_delete()]
        named = [override.value() for override in given] or [*self._in_files(defaults)]
        return str(named[-1]) if named and named[-1] is not None else None

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *flags: bool, **named: bool
    ) -> DictConfig:
        self._overrides = parse(overrides, self).overrides
        return super().load_configuration(config_name, overrides, run_mode, *flags, **named)

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        self._folder = self.folder(self._overrides, defaults)
        composed: DictConfig = super()._compose_config_from_defaults_list(defaults, repo)
        return composed

    def _in_files(self, defaults: Sequence[ResultDefault]) -> Iterator[Any]:
        section, _, name = KEY.partition(".")
        for default in defaults:
            key = {"": KEY, section: name}.get(default.package or "", "")
            if key and (value := self._in_file(default.config_path or "", key)) is not None:
                yield value

    def _in_file(self, name: str, key: str) -> Any:
        """A value of an option file, None where it has none; each is read once."""
        if (name, key) not in self._named:
            result = self.repository.load_config(name)
            is_option = result is not None and isinstance(result.config, DictConfig) and not result.is_schema_source
            self._named[name, key] = OmegaConf.select(result.config, key) if result and is_option else None
        return self._named[name, key]

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        result: ConfigResult = super()._load_single_config(default, repo)
        if not default.package:
            # The file's own values, where all others are a copy that stands in its package: a merge moves them.
            result = copy.copy(result)
            result.config = copy.deepcopy(result.config)
        if values := stated(self._folder, default.config_path or ""):
            merged = OmegaConf.merge(result.config, values)
            assert isinstance(merged, DictConfig)
            result.config = merged
        return result
