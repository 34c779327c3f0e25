"""What exists, found by listing folders: modules that can be named in the config, groups and their options.

Nothing found is imported and no YAML is parsed, so that `maxhydra --help` answers at once.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from maxhydra.config.schema.run import Task

PACKAGE = Path(__file__).resolve().parent.parent
CONF = PACKAGE / "conf"
GLOBAL = "@package _global_"


OptionSource = Callable[[str, str], dict[str, Any]]
OPTION_SOURCES: dict[str, OptionSource] = {}


def register_option_source(option: str, source: OptionSource) -> None:
    """Make an option such as `model/from_hf` take values from a folder that a config key names.

    `source(key, folder)` returns values of the whole config, or raises ConfigError about `key`. Packages above `config`
    register themselves, because `config` imports none of them.
    """
    OPTION_SOURCES[option] = source


def modules(package: str) -> list[str]:
    """Public modules of a package of maxhydra, by the names of their files."""
    folder = PACKAGE.joinpath(*package.split(".")[1:])
    found = (path for path in folder.glob("*") if path.suffix == ".py" or (path / "__init__.py").is_file())
    return sorted(path.stem for path in found if not path.name.startswith("_"))


@cache
def task_schemas() -> dict[str, type[Task]]:
    """Task name -> the schema class with its fields, for the tasks that have fields of their own."""
    found: dict[str, type[Task]] = {}
    for name in modules("maxhydra.config.schema.tasks"):
        module = importlib.import_module(f"maxhydra.config.schema.tasks.{name}")
        classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Task)]
        (found[name],) = (cls for cls in classes if cls.__module__ == module.__name__)
    return found


def groups(folders: tuple[Path, ...] = (CONF,)) -> dict[str, list[Path]]:
    """Group -> its option files: every folder with YAML files, in the order of the table of contents in config.yaml."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            group = path.parent.relative_to(folder).as_posix()
            if group != "." and not group.startswith("hydra"):
                found.setdefault(group, []).append(path)
    order = [group for group, _ in defaults()]
    return dict(sorted(found.items(), key=lambda item: (item[0] not in order, *_position(item[0], order))))


def _position(group: str, order: list[str]) -> tuple[int, str]:
    return (order.index(group) if group in order else 0, group)


def defaults() -> Iterator[tuple[str, str]]:
    """Group and default option, as config.yaml lists them."""
    for line in (CONF / "config.yaml").read_text().splitlines():
        if entry := re.match(r"\s*- (?:optional )?([\w/]+): (\S+)", line):
            yield entry[1], entry[2]


def description(path: Path) -> str:
    """The first comment line of an option file."""
    comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if comment and not comment.startswith("@")), "")


def is_overlay(path: Path) -> bool:
    """Whether an option file may set any key, and not only those of its own section."""
    return GLOBAL in path.read_text()
