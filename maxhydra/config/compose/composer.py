"""Overrides and YAML options to a checked `Config`."""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.utils import create_config_search_path
from hydra.conf import RuntimeConf
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from maxhydra.config.compose import resolvers
from maxhydra.config.compose.hydra_errors import COMPOSE_ERRORS, problem_of
from maxhydra.config.compose.hydra_loader import Loader, folder_problems, is_chosen, stated
from maxhydra.config.compose.merge import ConfigMerge
from maxhydra.config.compose.overrides import Groups, parse, place_override, sweep_problem
from maxhydra.config.compose.provenance import SourcedValue, display_path, locate, read_yaml
from maxhydra.config.compose.validate import UNSURE, Validator
from maxhydra.config.errors import UNSET, ConfigError, Problem
from maxhydra.config.registry import task_schemas
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import origin_to_show

CONFIG_NAME = "config"
MODULE = "maxhydra.conf"


@dataclasses.dataclass(frozen=True)
class Composed:
    """A valid config, the option chosen in each group, and where every value came from."""

    config: Config
    choices: dict[str, str]
    assembly: ConfigMerge

    def origin(self, path: str) -> str:
        """Where the value at a dotted path was set."""
        return self.assembly.origin(path)


@dataclasses.dataclass(frozen=True)
class CheckedConfig:
    """A set of overrides, and all that is wrong with it.

    `composes` says that Hydra would take it, though a check may refuse it; `node` is what stands of it.
    """

    node: DictConfig | None
    config: Config | None
    composes: bool
    choices: dict[str, str]
    assembly: ConfigMerge
    problems: list[Problem]

    def composed(self) -> Composed:
        """The valid config; all problems at once where there are any."""
        if self.problems:
            raise ConfigError(self.problems)
        assert self.config is not None
        return Composed(self.config, self.choices, self.assembly)


def compose(overrides: list[str], config_dir: str | None = None) -> Composed:
    """The config that `maxhydra OVERRIDES` would run with."""
    composer = _own_options() if config_dir is None else Composer(config_dir)
    return composer.examine(overrides).composed()


@cache
def _own_options() -> "Composer":
    """One for all who ask: no file of ours changes."""
    return Composer()


class Composer:
    """Hydra's config loader over our options and, where given, a folder of the user's."""

    def __init__(self, config_dir: str | None = None, config_name: str = CONFIG_NAME, searchpath: Iterable[str] = ()):
        register()
        self.config_name = config_name
        search_path = create_config_search_path(f"pkg://{MODULE}")
        schema = search_path.get_path().pop()  # Hydra wants the schemas last
        self.config_dir = config_dir
        if config_dir is not None:
            folder = Path(config_dir).expanduser().absolute()
            if not folder.is_dir():
                raise ConfigError(Problem("--config-dir", "no such folder", config_dir, hint=f"looked for {folder}"))
            search_path.append("command-line", f"file://{folder}")
        for place in searchpath:
            search_path.append("hydra.searchpath in command-line", place)
        search_path.get_path().append(schema)
        self.loader = Loader(config_search_path=search_path)
        self.groups = Groups(self.loader.repository)
        self._defaults: dict[tuple[str, ...], DefaultsList] = {}

    def examine(self, overrides: list[str], *, with_hydra: bool = True) -> CheckedConfig:
        """Compose and check one job.

        `with_hydra=False` stops short of Hydra's own composition, which gives the same values ten times slower: enough
        to validate the jobs of a sweep, which Hydra composes again one by one.
        """
        assembly = ConfigMerge()
        parsed = parse(overrides, self.loader)
        assembly.problems += parsed.problems
        sound = [override for override in parsed.overrides if self._is_sound(override, assembly)]
        defaults = self._select(sound, assembly)
        folder = self.loader.folder(sound, defaults.defaults if defaults else [])
        for default in defaults.defaults if defaults else []:
            self._place_default(default, assembly)
            self._place_stated(folder, default, assembly)
        assembly.problems += folder_problems(folder, _choices(defaults))
        if folder is None and is_chosen(_choices(defaults)):
            assembly.unsure.add("model")  # all of it waits for the folder
        for override in sound:
            if not self.groups.is_choice(override) and not override.is_hydra_override():
                place_override(assembly, override)
        assembly.demand()
        composes = not assembly.problems
        node = self._node(overrides, assembly, with_hydra=with_hydra)
        config = None
        if node is not None and defaults is not None:
            builder = Validator(origin=lambda path: origin_to_show(assembly.origin(path)), unsure=assembly.unsure)
            built = builder.section(node)
            assembly.problems += builder.problems
            config = None if built is UNSURE or assembly.problems else built
        return CheckedConfig(node, config, composes, _choices(defaults), assembly, distinct(assembly.problems))

    def _is_sound(self, override: Override, assembly: ConfigMerge) -> bool:
        """Whether an override can go on to Hydra; a choice that does not exist leaves its section unsure."""
        group = override.key_or_group
        problem = None
        if override.is_sweep_override():
            problem = sweep_problem(override)
        elif self.groups.is_choice(override):
            problem = self.groups.choice_problem(override)
            if problem is not None:
                section = group.replace("/", ".")
                assembly.unsure.add(section if assembly.spec(section) is not None else "")
        elif "/" in group and not override.is_hydra_override():
            problem = self.groups.unknown(group, override.value())
        if problem is not None:
            assembly.problems.append(problem)
        return problem is None

    def _select(self, overrides: Iterable[Override], assembly: ConfigMerge) -> DefaultsList | None:
        """The option files in the order in which they are merged."""
        chosen = [o for o in overrides if self.groups.is_choice(o) or o.key_or_group == "hydra.searchpath"]
        key = tuple(o.input_line or "" for o in chosen)
        if key not in self._defaults:
            try:
                self._defaults[key] = self.loader.compute_defaults_list(self.config_name, list(key), RunMode.RUN)
            except COMPOSE_ERRORS as error:
                assembly.problems.append(self._blamed(problem_of(error), chosen))
                return None
        return self._defaults[key]

    def _blamed(self, problem: Problem, chosen: Iterable[Override]) -> Problem:
        """Name the file and line where a defaults list makes a wrong choice; Hydra does not tell."""
        names = [f"{override.key_or_group}/{override.value()}" for override in chosen]
        entry = re.compile(
            rf"-.*\b{re.escape(problem.path)}\b" + ("" if problem.value is UNSET else f".*{problem.value}")
        )
        for path in filter(None, map(self.file, [*names, self.config_name])):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if not problem.source and entry.search(line):
                    return dataclasses.replace(problem, source=f"{display_path(path)}:{number}")
        return problem

    def _place_default(self, default: ResultDefault, assembly: ConfigMerge) -> None:
        name, package = default.config_path or "", default.package or ""
        if name.startswith("hydra/"):
            return
        if name in SCHEMAS:
            assembly.set_type(package, SCHEMAS[name])
            return
        path = self.file(name)
        if path is None:
            return
        content = read_yaml(path)
        if not isinstance(content.value, dict):
            assembly.problems.append(Problem(display_path(path), "holds no keys", accepted="key: value lines"))
            return
        own = {key: item for key, item in content.value.items() if key != "defaults"}
        if not package:
            own.pop("hydra", None)
        if package.split(".")[0] != "hydra":
            assembly.place(package, SourcedValue(own, content.source))

    def _place_stated(self, folder: str | None, default: ResultDefault, assembly: ConfigMerge) -> None:
        """What a folder states for an option; one that cannot be read leaves the model unsure."""
        try:
            values = stated(folder, default.config_path or "")
        except ConfigError as error:
            assembly.problems += error.problems
            assembly.unsure.add("model")
            return
        if values:
            assembly.place("", locate(values, f"config.json of {folder}"))

    def file(self, name: str) -> Path | None:
        """The YAML file of a config, in the first folder of the search path that has it."""
        for source in self.loader.get_sources():
            if source.scheme() in ("pkg", "file") and source.is_config(name):
                return _folder(source.scheme(), source.path) / f"{name.removesuffix('.yaml')}.yaml"
        return None

    def _node(self, overrides: list[str], assembly: ConfigMerge, *, with_hydra: bool) -> DictConfig | None:
        """Hydra's composition where all is well so far, and what stands of it otherwise."""
        try:
            if assembly.problems or not with_hydra:
                return assembly.config()
            node = self.loader.load_configuration(self.config_name, overrides, RunMode.RUN)
        except COMPOSE_ERRORS as error:
            assembly.problems.append(problem_of(error))
            return None
        OmegaConf.set_struct(node, False)
        with open_dict(node):
            del node["hydra"]
        return node


def _folder(scheme: str, path: str) -> Path:
    return Path(str(resources.files(path))) if scheme == "pkg" else Path(path)


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once; the jobs of a sweep share most of theirs."""
    return list({str(problem): problem for problem in problems}.values())


def _choices(defaults: DefaultsList | None) -> dict[str, str]:
    """The option chosen in each group, Hydra's own groups left out."""
    known = defaults.overrides.known_choices if defaults else {}
    used = {default.config_path for default in defaults.defaults} if defaults else set()
    return {group: option for group, option in _own(known) if f"{group.partition('@')[0]}/{option}" in used}


def job_choices(runtime: RuntimeConf) -> dict[str, str]:
    """The same within a job, from `hydra.runtime`, which lists options that are optional and absent too."""
    folders = [
        _folder(source.schema, source.path) for source in runtime.config_sources if source.schema != "structured"
    ]
    files = {group: f"{group.partition('@')[0]}/{option}.yaml" for group, option in _own(runtime.choices)}
    existing = {group for group, file in files.items() if any((folder / file).is_file() for folder in folders)}
    return {group: option for group, option in _own(runtime.choices) if group in existing}


def _own(choices: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Sorted choices without Hydra's own and those of nothing."""
    return sorted((group, option) for group, option in choices.items() if option and not group.startswith("hydra/"))


SCHEMAS: dict[str, type] = {"schema/config": Config} | {f"schema/task/{n}": cls for n, cls in task_schemas().items()}


@cache
def register() -> None:
    """Tell Hydra our schemas and resolvers."""
    with warnings.catch_warnings():
        # Hydra 1.4 and OmegaConf 2.4 warn of names that will go, and 1.3 has no others.
        warnings.simplefilter("ignore")
        hydra.version.setbase("1.3")
        setup_globals()
        resolvers.register()
    for name, cls in SCHEMAS.items():
        group, _, option = name.rpartition("/")
        ConfigStore.instance().store(group=group, name=option, node=cls, provider="maxhydra")
