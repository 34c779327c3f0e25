"""Values with their origin: YAML files with line numbers, and the command line."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

COMMAND_LINE = "the command line"
# libyaml's parser is ten times faster, if PyYAML was built with it.
LINE_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclasses.dataclass(frozen=True)
class SourcedValue:
    """A scalar, a list, or a dict of sourced values, with the file and line or command line it came from."""

    value: Any
    source: str

    @property
    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: item.plain for key, item in self.value.items()}
        return self.value

    def at(self, path: str) -> "SourcedValue | None":
        """Return the value at a dotted path, or None."""
        node: SourcedValue | None = self
        for name in path.split("."):
            node = node.value.get(name) if node is not None and isinstance(node.value, dict) else None
        return node


def locate(value: Any, source: str) -> SourcedValue:
    """Attribute a plain value, with everything in it, to one origin."""
    if isinstance(value, dict):
        return SourcedValue({str(key): locate(item, source) for key, item in value.items()}, source)
    return SourcedValue(value, source)


def read_yaml(path: Path) -> SourcedValue:
    """Return a YAML file as OmegaConf parses it, every value with its line."""
    return parse_yaml(path.read_text(encoding="utf-8"), display_path(path))


@cache
def parse_yaml(text: str, name: str) -> SourcedValue:
    """Return YAML text as sourced values, `name:LINE` each: values parsed by OmegaConf, lines by PyYAML."""
    content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    tree = yaml.compose(text, Loader=LINE_LOADER)
    return _locate(content, tree, name, line=1)


def _locate(value: Any, node: yaml.Node | None, name: str, line: int) -> SourcedValue:
    """Give each key its line; a key from a YAML merge (`<<`) gets the line of the mapping that merges it."""
    if not isinstance(value, dict):
        return SourcedValue(value, f"{name}:{line}")
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    keys = {key.value: (key.start_mark.line + 1, item) for key, item in pairs}
    items = {}
    for key, item in value.items():
        key_line, key_node = keys.get(str(key), (line, None))
        items[str(key)] = _locate(item, key_node, name, key_line)
    return SourcedValue(items, f"{name}:{line}")


def display_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it, and absolute otherwise."""
    full, cwd = path.resolve(), Path.cwd()
    return str(full.relative_to(cwd) if full.is_relative_to(cwd) else full)
