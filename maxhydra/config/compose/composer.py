"""Composition of overrides and YAML options into a validated `Config`."""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import RuntimeConf
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig

from maxhydra.config.compose import hydra_loader
from maxhydra.config.compose.hydra_errors import COMPOSE_ERRORS, problem_of
from maxhydra.config.compose.hydra_loader import (
    DefaultsList,
    Groups,
    Loader,
    create_config_search_path,
    reads_folder,
    source_file,
    source_folder,
    source_values,
    unused_folder,
)
from maxhydra.config.compose.merge import ConfigMerge
from maxhydra.config.compose.overrides import apply_override, parse, replaced_key_problem, sweep_problem
from maxhydra.config.compose.provenance import SourcedValue, locate, read_yaml
from maxhydra.config.compose.schema_store import store_schemas
from maxhydra.config.compose.validate import UNSURE, Validator
from maxhydra.config.errors import UNSET, ConfigError, Problem
from maxhydra.config.registry import project_packages, task_schemas
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import origin_to_show
from maxhydra.config.usage import unused_problems
from maxhydra.config.yaml_files import display_path

CONFIG_NAME = "config"


@dataclasses.dataclass(frozen=True)
class Composed:
    """A valid config, the option chosen in each group, and the origin of every value."""

    config: Config
    choices: dict[str, str]
    merge: ConfigMerge
    node: DictConfig
    """The config as Hydra composed it, with the `hydra` section; without it if composed with `with_hydra=False`."""

    def origin(self, path: str) -> str:
        """Return where the value at a dotted path was set."""
        return self.merge.origin(path)


@dataclasses.dataclass(frozen=True)
class CheckedConfig:
    """The result of composing and validating a set of overrides, with every problem.

    `composes` is true if Hydra accepts the overrides, even if validation rejects a value. `node` holds the values that
    could be merged, `config` is None if there are problems.
    """

    node: DictConfig | None
    config: Config | None
    composes: bool
    choices: dict[str, str]
    merge: ConfigMerge
    problems: list[Problem]

    def composed(self) -> Composed:
        """Return the valid config; raise ConfigError with all problems at once if there are any."""
        if self.problems:
            raise ConfigError(self.problems)
        assert self.config is not None and self.node is not None
        return Composed(self.config, self.choices, self.merge, self.node)


def compose(overrides: list[str], config_dir: str | None = None) -> Composed:
    """Return the config that `maxhydra OVERRIDES` runs with; raise ConfigError if it is not valid."""
    # Keys of the section hydra are validated by Hydra.
    with_hydra = any(override.lstrip("+~").startswith("hydra") for override in overrides)
    return find_composer(config_dir).check_overrides(overrides, with_hydra=with_hydra).composed()


def find_composer(
    config_dir: str | None = None, config_name: str = CONFIG_NAME, searchpath: Sequence[str] = ()
) -> "Composer":
    """Return a composer; the one over the packaged options, which do not change while a process runs, is shared."""
    is_default = config_dir is None and config_name == CONFIG_NAME and not searchpath
    return _default_composer(project_packages()) if is_default else Composer(config_dir, config_name, searchpath)


@cache
def _default_composer(projects: tuple[str, ...]) -> "Composer":
    """Return the composer over the packaged options and those of installed projects."""
    return Composer()


class Composer:
    """Hydra's config loader over the packaged options and, if given, a folder of the user's options."""

    def __init__(self, config_dir: str | None = None, config_name: str = CONFIG_NAME, searchpath: Iterable[str] = ()):
        register()
        self.config_name = config_name
        search_path = create_config_search_path(f"pkg://{hydra_loader.PACKAGED}")
        schema = search_path.get_path().pop()  # Hydra requires the schemas at the end of the search path
        for package in project_packages():
            search_path.append(package, f"pkg://{package}")
        self.config_dir = config_dir
        if config_dir is not None:
            folder = Path(config_dir).expanduser().absolute()
            if not folder.is_dir():
                raise ConfigError(Problem("--config-dir", "no such folder", config_dir, hint=f"looked for {folder}"))
            search_path.append("command-line", f"file://{folder}")
        for path in searchpath:
            search_path.append("hydra.searchpath in command-line", path)
        search_path.get_path().append(schema)
        self.loader = Loader(config_search_path=search_path)
        self.groups = Groups(self.loader.repository)
        self._defaults: dict[tuple[str, ...], DefaultsList] = {}

    def check_overrides(self, overrides: list[str], *, with_hydra: bool = True) -> CheckedConfig:
        """Compose and validate the config of one job.

        Hydra composes its own section and applies the overrides to the merged option files. It merges these files
        itself if the merge here could differ (`ConfigMerge.is_exact`). `with_hydra=False` skips Hydra, which is enough
        to validate the jobs of a sweep before Hydra composes them one by one.
        """
        merge = ConfigMerge()
        parsed = parse(overrides, self.loader)
        merge.problems += parsed.problems
        usable = [override for override in parsed.overrides if self._is_usable(override, merge)]
        defaults = self._select(usable, merge)
        layers = defaults.defaults if defaults else []
        merge.set_option_types(self.loader.option_types(usable, layers))
        folder = self.loader.folder(usable, layers)
        for default in layers:
            self._merge_default(default, merge)
            self._merge_source(folder, default, merge)
        merge.problems += unused_folder(folder, _choices(defaults))
        if folder is None and reads_folder(_choices(defaults)):
            merge.unsure.add("model")  # every value of the model depends on the folder
        has_schema = any(default.config_path == hydra_loader.ROOT_SCHEMA for default in layers)
        merge.is_exact &= has_schema
        files = _merged_files(merge) if with_hydra else None
        for override in usable:
            if not self.groups.is_choice(override) and not override.is_hydra_override():
                apply_override(merge, override)
        merge.check_required()
        composes = not merge.problems
        node = self._node(overrides, merge, files, with_hydra=with_hydra)
        config = None
        if node is not None and defaults is not None:
            validator = Validator(origin=lambda path: origin_to_show(merge.origin(path)), unsure=merge.unsure)
            # Hydra's values have no types if a primary config of the user leaves out the schema.
            section = validator.section(node if has_schema else merge.config())
            merge.problems += validator.problems
            if section is not UNSURE and not merge.problems:
                merge.problems += unused_problems(section, self._given_values(usable))
            config = None if section is UNSURE or merge.problems else section
        return CheckedConfig(node, config, composes, _choices(defaults), merge, distinct(merge.problems))

    def _given_values(self, overrides: Iterable[Override]) -> list[tuple[str, Any]]:
        """Return the keys that overrides set, with their values."""
        values = [o for o in overrides if not (self.groups.is_choice(o) or o.is_hydra_override() or o.is_delete())]
        return [(override.key_or_group, override.value()) for override in values]

    def _is_usable(self, override: Override, merge: ConfigMerge) -> bool:
        """Return whether Hydra can process an override; a choice that does not exist makes its section unsure."""
        group = override.key_or_group
        problem = replaced_key_problem(override)
        if problem is not None:
            pass
        elif override.is_sweep_override():
            problem = sweep_problem(override)
        elif self.groups.is_choice(override):
            problem = self.groups.choice_problem(override)
            if problem is not None:
                section = group.replace("/", ".")
                merge.unsure.add(section if merge.spec(section) is not None else "")
        elif "/" in group and not override.is_hydra_override():
            problem = self.groups.unknown(group, override.value())
        if problem is not None:
            merge.problems.append(problem)
        return problem is None

    def _select(self, overrides: Iterable[Override], merge: ConfigMerge) -> DefaultsList | None:
        """Return the option files in merge order."""
        chosen = [o for o in overrides if self.groups.is_choice(o) or o.key_or_group == "hydra.searchpath"]
        key = tuple(o.input_line or "" for o in chosen)
        if key not in self._defaults:
            try:
                self._defaults[key] = self.loader.compute_defaults_list(self.config_name, list(key), RunMode.RUN)
            except COMPOSE_ERRORS as error:
                merge.problems.append(self._with_source(problem_of(error), chosen))
                return None
            except ConfigError as error:
                merge.problems += error.problems
                return None
        return self._defaults[key]

    def _with_source(self, problem: Problem, chosen: Iterable[Override]) -> Problem:
        """Add the file and line of a wrong choice in a defaults list, which Hydra's error does not contain."""
        names = [f"{override.key_or_group}/{override.value()}" for override in chosen]
        entry = re.compile(
            rf"-.*\b{re.escape(problem.path)}\b" + ("" if problem.value is UNSET else f".*{problem.value}")
        )
        for path in filter(None, map(self.file, [*names, self.config_name])):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                if not problem.source and entry.search(line):
                    return dataclasses.replace(problem, source=f"{display_path(path)}:{number}")
        return problem

    def _merge_default(self, default: ResultDefault, merge: ConfigMerge) -> None:
        name, package = default.config_path or "", default.package or ""
        if name.startswith("hydra/"):
            return
        if name in SCHEMAS:
            merge.set_type(package, SCHEMAS[name])
            return
        path = self.file(name)
        merge.is_exact &= path is not None and self.loader.has_text_keys(default)
        if path is None:
            return
        content = read_yaml(path)
        if not isinstance(content.value, dict):
            merge.problems.append(Problem(display_path(path), "has no keys", accepted="key: value lines"))
            return
        values = {key: item for key, item in content.value.items() if key != "defaults"}
        if not package:
            values.pop("hydra", None)
        if package.split(".")[0] != "hydra":
            merge.set_value(package, SourcedValue(values, content.source))

    def _merge_source(self, folder: str | None, default: ResultDefault, merge: ConfigMerge) -> None:
        """Merge the values of an option's source; if the folder cannot be read, the model is unsure."""
        try:
            values = source_values(folder, default.config_path or "")
        except ConfigError as error:
            merge.problems += error.problems
            merge.unsure.add("model")
            return
        if values:
            merge.set_value("", locate(values, f"config.json of {folder}"))

    def file(self, name: str) -> Path | None:
        """Return the YAML file of a config, from the first folder of the search path that has it."""
        name = self.loader.repository.inherited(name)
        for source in self.loader.get_sources():
            if source.scheme() in ("pkg", "file") and source.is_config(name):
                return source_file(source.scheme(), source.path, name)
        return None

    def _node(
        self, overrides: list[str], merge: ConfigMerge, files: DictConfig | None, *, with_hydra: bool
    ) -> DictConfig | None:
        """Return Hydra's composition, or the merged values if there are problems already."""
        try:
            if merge.problems or not with_hydra:
                return merge.config()
            with self.loader.use_files(files):
                return self.loader.load_configuration(self.config_name, overrides, RunMode.RUN)
        except ConfigError as error:
            merge.problems += error.problems
        except COMPOSE_ERRORS as error:
            merge.problems.append(problem_of(error))
        return None


def _merged_files(merge: ConfigMerge) -> DictConfig | None:
    """Return the values of the option files; None if Hydra has to merge the files and report their errors."""
    try:
        return merge.config() if merge.is_exact and not merge.problems else None
    except COMPOSE_ERRORS:
        return None


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Return each problem once; the jobs of a sweep share most of theirs."""
    return list({str(problem): problem for problem in problems}.values())


def _choices(defaults: DefaultsList | None) -> dict[str, str]:
    """Return the option chosen in each group, without Hydra's own groups."""
    known = defaults.overrides.known_choices if defaults else {}
    used = {default.config_path for default in defaults.defaults} if defaults else set()
    return {group: option for group, option in _without_hydra(known) if f"{group.partition('@')[0]}/{option}" in used}


def job_choices(runtime: RuntimeConf) -> dict[str, str]:
    """Return the chosen options within a job of a sweep.

    `hydra.runtime.choices` also lists optional groups whose option does not exist; these are left out.
    """
    folders = [
        source_folder(source.schema, source.path) for source in runtime.config_sources if source.schema != "structured"
    ]
    files = {group: f"{group.partition('@')[0]}/{option}.yaml" for group, option in _without_hydra(runtime.choices)}
    existing = {group for group, file in files.items() if any((folder / file).is_file() for folder in folders)}
    return {group: option for group, option in _without_hydra(runtime.choices) if group in existing}


def _without_hydra(choices: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Return choices in sorted order, without Hydra's own groups and without empty ones."""
    return sorted((group, option) for group, option in choices.items() if option and not group.startswith("hydra/"))


SCHEMAS: dict[str, type] = {
    hydra_loader.ROOT_SCHEMA: Config,
    **{f"schema/task/{name}": cls for name, cls in task_schemas().items()},
}


@cache
def register() -> None:
    """Register the schema classes and resolvers with Hydra and OmegaConf."""
    with warnings.catch_warnings():
        # Hydra 1.4 and OmegaConf 2.4 deprecate names that are the only ones in 1.3.
        warnings.simplefilter("ignore")
        hydra.version.setbase("1.3")
        setup_globals()
        hydra_loader.register()
    store_schemas(SCHEMAS)
