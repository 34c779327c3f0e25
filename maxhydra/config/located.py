"""Values with the place where each was written: YAML files with line numbers, and the command line."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

COMMAND_LINE = "the command line"


@dataclasses.dataclass(frozen=True)
class Located:
    """A scalar, a list, or a dict of further located values."""

    value: Any
    source: str

    @property
    def plain(self) -> Any:
        """The value without its places."""
        if isinstance(self.value, dict):
            return {key: item.plain for key, item in self.value.items()}
        return self.value

    def at(self, path: str) -> "Located | None":
        """What stands under a dotted path."""
        here: Located | None = self
        for name in path.split("."):
            here = here.value.get(name) if here is not None and isinstance(here.value, dict) else None
        return here


def locate(value: Any, source: str) -> Located:
    """A plain value, all of it from one place."""
    if isinstance(value, dict):
        return Located({str(key): locate(item, source) for key, item in value.items()}, source)
    return Located(value, source)


def read_yaml(path: Path) -> Located:
    """A YAML file as OmegaConf reads it, every value with its line."""
    return parse_yaml(path.read_text(encoding="utf-8"), shown(path))


@cache
def parse_yaml(text: str, name: str) -> Located:
    """YAML text; `name` is what its lines are called."""
    loader = get_yaml_loader()(text)
    loader.name = name
    try:
        node = loader.get_single_node()
        return Located({}, name) if node is None else _convert(loader, node, name)
    finally:
        loader.dispose()


def _convert(loader: Any, node: yaml.Node, name: str) -> Located:
    source = f"{name}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        return Located(loader.construct_object(node, deep=True), source)
    loader.construct_mapping(node, deep=True)  # refuses a key that stands twice, and resolves `<<`
    items = {}
    for key, item in node.value:
        # A block that begins under its key is best found by the line of the key.
        located = _convert(loader, item, name)
        items[str(loader.construct_object(key))] = Located(located.value, f"{name}:{key.start_mark.line + 1}")
    return Located(items, source)


def shown(path: Path) -> str:
    """A path as people find it: relative where the file lies under the working directory."""
    full, here = path.resolve(), Path.cwd()
    return str(full.relative_to(here) if full.is_relative_to(here) else full)
