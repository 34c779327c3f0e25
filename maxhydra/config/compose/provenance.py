"""Values with the place where each was written: YAML files with line numbers, and the command line."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

COMMAND_LINE = "the command line"
# libyaml's parser, where PyYAML was built with it, is ten times faster.
LINE_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclasses.dataclass(frozen=True)
class SourcedValue:
    """A scalar, a list, or a dict of further located values."""

    value: Any
    source: str

    @property
    def plain(self) -> Any:
        """The value without its places."""
        if isinstance(self.value, dict):
            return {key: item.plain for key, item in self.value.items()}
        return self.value

    def at(self, path: str) -> "SourcedValue | None":
        """What stands under a dotted path."""
        here: SourcedValue | None = self
        for name in path.split("."):
            here = here.value.get(name) if here is not None and isinstance(here.value, dict) else None
        return here


def locate(value: Any, source: str) -> SourcedValue:
    """A plain value, all of it from one place."""
    if isinstance(value, dict):
        return SourcedValue({str(key): locate(item, source) for key, item in value.items()}, source)
    return SourcedValue(value, source)


def read_yaml(path: Path) -> SourcedValue:
    """A YAML file as OmegaConf reads it, every value with its line."""
    return parse_yaml(path.read_text(encoding="utf-8"), display_path(path))


@cache
def parse_yaml(text: str, name: str) -> SourcedValue:
    """YAML text; `name` is what its lines are called. OmegaConf reads the values, the parser under it the lines."""
    content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    tree = yaml.compose(text, Loader=LINE_LOADER)
    return _locate(content, tree, name, line=1)


def _locate(value: Any, node: yaml.Node | None, name: str, line: int) -> SourcedValue:
    """Each key with its own line; one that came through a merge (`<<`) with the line of what it was merged into."""
    if not isinstance(value, dict):
        return SourcedValue(value, f"{name}:{line}")
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    keys = {key.value: (key.start_mark.line + 1, item) for key, item in pairs}
    items = {}
    for key, item in value.items():
        own_line, own_node = keys.get(str(key), (line, None))
        items[str(key)] = _locate(item, own_node, name, own_line)
    return SourcedValue(items, f"{name}:{line}")


def display_path(path: Path) -> str:
    """A path as people find it: relative where the file lies under the working directory."""
    full, here = path.resolve(), Path.cwd()
    return str(full.relative_to(here) if full.is_relative_to(here) else full)
