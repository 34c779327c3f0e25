"""Discovery of plug-in modules, config groups and options by listing folders.

Nothing is imported and no YAML is parsed, so that `maxhydra --help` is fast.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from maxhydra.config.schema.run import Task

PACKAGE = Path(__file__).resolve().parent.parent
CONF = PACKAGE / "conf"
GLOBAL = "@package _global_"
# Entry points through which an installed project adds its options: package names, such as my_project.conf.
PROJECTS = "maxhydra.conf"


OptionSource = Callable[[str, str], dict[str, Any]]
OPTION_SOURCES: dict[str, OptionSource] = {}


def register_option_source(option: str, source: OptionSource) -> None:
    """Make an option such as `model/from_hf` take values from a folder that a config key names.

    `source(key, folder)` returns values of the whole config, or raises ConfigError about `key`. Packages above `config`
    register themselves, because `config` imports none of them.
    """
    OPTION_SOURCES[option] = source


def modules(package: str) -> list[str]:
    """Return the names of the public modules of a maxhydra package."""
    folder = PACKAGE.joinpath(*package.split(".")[1:])
    paths = (path for path in folder.glob("*") if path.suffix == ".py" or (path / "__init__.py").is_file())
    return sorted(path.stem for path in paths if not path.name.startswith("_"))


@cache
def task_schemas() -> dict[str, type[Task]]:
    """Return the schema class of every task that has additional fields: TeacherLogitsTask is that of teacher_logits."""
    schemas: dict[str, type[Task]] = {}
    for name in modules("maxhydra.config.schema.tasks"):
        module = importlib.import_module(f"maxhydra.config.schema.tasks.{name}")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Task) and cls is not Task:
                schemas[re.sub(r"(?<!^)([A-Z])", r"_\1", cls.__name__.removesuffix("Task")).lower()] = cls
    return schemas


def project_packages() -> tuple[str, ...]:
    """Return the packages of options that installed projects declare as entry points of the group `maxhydra.conf`."""
    return tuple(package for package in _declared_packages(tuple(sys.path)) if _is_package(package))


@cache
def _declared_packages(paths: tuple[str, ...]) -> list[str]:
    """Return the declared packages. This reads a file of every installed package, so once per value of `sys.path`."""
    return sorted(entry.value for entry in entry_points(group=PROJECTS))


def project_folders() -> list[Path]:
    """Return the folders of the options of installed projects."""
    return [Path(str(resources.files(package))) for package in project_packages()]


def _is_package(name: str) -> bool:
    """Return whether a package can be imported; an entry point may remain of a project that was deleted."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def groups(folders: tuple[Path, ...] = (CONF,)) -> dict[str, list[Path]]:
    """Return the option files of every group, in the order of the defaults list in config.yaml."""
    options: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            group = path.parent.relative_to(folder).as_posix()
            if group != "." and not group.startswith("hydra"):
                options.setdefault(group, []).append(path)
    order = [group for group, _ in defaults()]
    return dict(sorted(options.items(), key=lambda item: (item[0] not in order, *_position(item[0], order))))


def _position(group: str, order: list[str]) -> tuple[int, str]:
    return (order.index(group) if group in order else 0, group)


def defaults() -> Iterator[tuple[str, str]]:
    """Yield group and default option, as listed in config.yaml."""
    for line in (CONF / "config.yaml").read_text(encoding="utf-8").splitlines():
        if entry := re.match(r"\s*- (?:optional )?([\w/]+): (\S+)", line):
            yield entry[1], entry[2]


def description(path: Path) -> str:
    """Return the first comment line of an option file."""
    comments = (line[1:].strip() for line in _text(path).splitlines() if line.startswith("#"))
    return next((comment for comment in comments if comment and not comment.startswith("@")), "")


def is_overlay(path: Path) -> bool:
    """Return whether an option file can set any key, rather than only those of its section."""
    return GLOBAL in _text(path)


def _text(path: Path) -> str:
    """Return the text of an option file; `--help` also lists one that is not UTF-8."""
    return path.read_text(encoding="utf-8", errors="replace")
