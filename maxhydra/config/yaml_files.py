"""YAML files of others, checked before they are parsed, and YAML of configs. Imports neither OmegaConf nor Hydra.

A file of 1 KB can name 10^9 values through aliases, and OmegaConf takes 0.3 ms for each.
"""

from pathlib import Path
from typing import Any

import yaml

from maxhydra.config.errors import ConfigError, Problem

# libyaml's parser is ten times faster, if PyYAML was built with it.
FAST_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_FAST_DUMPER: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
# Text that YAML 1.1 reads as a boolean and PyYAML does not quote.
_BOOLEANS = ("y", "Y", "n", "N")
# Limits of a YAML file: bytes, values (an alias counts as often as it is used), and levels. The config of a run has
# 400 values in 6 levels.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 2**20, 20_000, 50


class _Dumper(_FAST_DUMPER):
    """Writes YAML as OmegaConf.to_yaml does, in a tenth of the time."""

    def ignore_aliases(self, data: object) -> bool:
        """Write a value that occurs twice in full."""
        return True


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    """Quote text that OmegaConf, unlike PyYAML, would read as a number, such as 1e-3."""
    try:
        float(text)
        has_quotes = True
    except ValueError:
        has_quotes = text in _BOOLEANS
    node: yaml.ScalarNode = dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if has_quotes else None)
    return node


_Dumper.add_representer(str, _represent_text)


def dump_yaml(values: Any) -> str:
    """Return dicts, lists and scalars as YAML that OmegaConf reads as the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


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
        for event in yaml.parse(text, Loader=FAST_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                counts.append(1)
                anchors.append(event.anchor or "")
            elif isinstance(event, yaml.CollectionEndEvent):
                size, anchor = counts.pop(), anchors.pop()
                counts[-1] += size
                sizes |= {anchor: size} if anchor else {}
            elif isinstance(event, yaml.AliasEvent):
                counts[-1] += sizes.get(event.anchor or "", 1)
            elif isinstance(event, yaml.ScalarEvent):
                counts[-1] += 1
            if reason := _excess(event, counts, anchors):
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise ConfigError(Problem(f"{name}:{line}", reason))
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


def may_exceed_limits(text: str) -> bool:
    """Return whether `check_yaml` is needed: without aliases and brackets, values and depth grow with the bytes."""
    has_aliases = "&" in text and "*" in text
    return has_aliases or text.count("[") + text.count("{") > MAX_DEPTH or len(text) > MAX_BYTES // 4


def display_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it, and absolute otherwise."""
    full, cwd = path.resolve(), Path.cwd()
    return str(full.relative_to(cwd) if full.is_relative_to(cwd) else full)
