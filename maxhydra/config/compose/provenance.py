"""Values with their origin: YAML files with line numbers, and the command line."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.yaml_files import FAST_LOADER, check_yaml, display_path, read_yaml_text

COMMAND_LINE = "the command line"


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
    return parse_yaml(read_yaml_text(path), display_path(path))


@cache
def parse_yaml(text: str, name: str) -> SourcedValue:
    """Return YAML text as sourced values, `name:LINE` each: values parsed by OmegaConf, lines by PyYAML."""
    check_yaml(text, name)
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        tree = yaml.compose(text, Loader=FAST_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(Problem(where, f"is not YAML: {error.problem or error.context}")) from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, AssertionError) as error:
        # PyYAML and OmegaConf raise plain errors for some values: a date of month 13, a file of a single number.
        reason = (str(error).splitlines() or ["is not a mapping of keys to values"])[0]
        raise ConfigError(Problem(name, f"cannot be read as YAML: {reason}")) from None
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
