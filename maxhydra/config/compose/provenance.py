"""Values with their origin: YAML files with line numbers, and the command line.

YAML of others is checked before it is parsed: a file of 1 KB can name 10^9 values through aliases, and OmegaConf takes
0.3 ms for each.
"""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maxhydra.config.errors import ConfigError, Problem

COMMAND_LINE = "the command line"
# libyaml's parser is ten times faster, if PyYAML was built with it.
LINE_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
# Limits of a YAML file: bytes, values (an alias counts as often as it is used), and levels. The config of a run has
# 400 values in 6 levels.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 2**20, 20_000, 50


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


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file within the limits of this module; ConfigError names the file and line."""
    name = display_path(path)
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8: byte 0x{content[error.start]:02x}"
        raise ConfigError(Problem(f"{name}:{line}", reason, hint="save the file as UTF-8")) from None
    check_yaml(text, name)
    return text


def check_yaml(text: str, name: str) -> None:
    """Raise ConfigError if YAML text exceeds a limit or refers to itself; syntax errors are left to the parser."""
    if len(text) > MAX_BYTES:
        raise ConfigError(Problem(name, "is too large for a config", accepted=f"at most {MAX_BYTES} bytes"))
    counts, anchors = [0], [""]  # values inside each open collection, and the collection's anchor
    sizes: dict[str, int] = {}
    try:
        for event in yaml.parse(text, Loader=LINE_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                counts.append(1)
                anchors.append(event.anchor or "")
            elif isinstance(event, yaml.CollectionEndEvent):
                size, anchor = counts.pop(), anchors.pop()
                counts[-1] += size
                sizes |= {anchor: size} if anchor else {}
            elif isinstance(event, yaml.AliasEvent):
                counts[-1] += sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                counts[-1] += 1
            if reason := _excess(event, counts, anchors):
                raise ConfigError(Problem(f"{name}:{event.start_mark.line + 1}", reason))
    except yaml.YAMLError:
        return


def _excess(event: yaml.Event, counts: list[int], anchors: list[str]) -> str:
    """Return which limit the values up to an event exceed, or an empty string."""
    if isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
        return f"*{event.anchor} refers to a value that contains it"
    if len(counts) > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep"
    # Only the innermost count has changed; those around it are added when it ends.
    return f"has more than {MAX_VALUES} values, counting aliases" if counts[-1] > MAX_VALUES else ""


@cache
def parse_yaml(text: str, name: str) -> SourcedValue:
    """Return YAML text as sourced values, `name:LINE` each: values parsed by OmegaConf, lines by PyYAML."""
    check_yaml(text, name)
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        tree = yaml.compose(text, Loader=LINE_LOADER)
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


def display_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it, and absolute otherwise."""
    full, cwd = path.resolve(), Path.cwd()
    return str(full.relative_to(cwd) if full.is_relative_to(cwd) else full)
