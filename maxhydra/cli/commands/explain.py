"""Explain a key, section or group, and where its value comes from: explain PATH [overrides].

maxhydra explain optimizer.learning_rate
maxhydra explain train.steps experiment=shakespeare
maxhydra explain model
"""

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maxhydra.cli import flags
from maxhydra.config.compose.composer import CheckedConfig, Composer, find_composer
from maxhydra.config.compose.overrides import missing_entry, searchpath
from maxhydra.config.compose.provenance import SourcedValue
from maxhydra.config.declare import MISSING
from maxhydra.config.errors import UNSET, ConfigError, show
from maxhydra.config.fields import Field, FieldType, fields
from maxhydra.config.registry import description

MAX_WIDTH = 30


def main(arguments: list[str]) -> int:
    """Print the explanation, then report the problems of the config: a key is mostly looked up when it fails."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    args = flags.parse(arguments)
    # Shell completion appends `=` to a key and a dot to a section.
    path = args.overrides[0].rstrip("=.") if args.overrides else ""
    composer = find_composer(args.config_dir, args.config_name, searchpath(args.overrides))
    checked = composer.check_overrides(args.overrides[1:], with_hydra=False)
    if problem := missing_entry(checked.merge, path, checked.merge.new_entry(path)):
        raise ConfigError(problem)
    lines = list(_explain(path, composer, checked))
    if not lines:
        raise ConfigError(checked.merge.unknown(path, SourcedValue(UNSET, "")))
    print("\n".join(lines), flush=True)
    checked.composed()
    return 0


def _explain(path: str, composer: Composer, checked: CheckedConfig) -> Iterator[str]:
    """Yield the lines for a path, which may be a key, a section, a group, or both section and group."""
    options = composer.groups.options(path) if path else []
    key = path.replace("/", ".") if options else path
    spec, field = checked.merge.spec(key), _field(key, checked)
    if spec is not None and path:
        yield f"{key}: {field.doc if field else 'an entry of ' + key.rpartition('.')[0]}"
    if options:
        yield f"options of the group {path} ({checked.choices.get(path, 'none')} is chosen):"
        files = {option: composer.file(f"{path}/{option}") for option in options}
        yield from _columns((option, description(file) if file else "") for option, file in files.items())
    if spec is not None and spec.is_section:
        yield "keys:"
        names = {name: f"{key}.{name}" if key else name for name in fields(spec.type)}
        yield from _columns((name, _value(names[name], checked), item.doc) for name, item in fields(spec.type).items())
    elif spec is not None:
        yield from _columns(_facts(key, spec, field, checked))


def _facts(key: str, spec: FieldType, field: Field | None, checked: CheckedConfig) -> Iterator[tuple[str, str]]:
    yield "type", str(spec)
    yield "accepted", spec.accepted
    if field is not None:
        yield "default", "none; a value is required" if field.default == MISSING else _format(field.default)
    yield "value", _value(key, checked)
    yield "set in", checked.merge.origin(key)


def _field(path: str, checked: CheckedConfig) -> Field | None:
    parent, _, name = path.rpartition(".")
    spec = checked.merge.spec(parent)
    return fields(spec.type).get(name) if spec is not None and spec.is_section else None


def _columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield aligned rows, with the last column wrapped to the width of the terminal."""
    table = list(rows)
    columns = max(shutil.get_terminal_size((110, 24)).columns, 80)
    widths = [min(MAX_WIDTH, max(map(len, cells))) for cells in zip(*table, strict=True)][:-1]
    indent = " " * (2 + sum(widths) + 2 * len(widths))
    for row in table:
        head = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        yield from textwrap.wrap(head + row[-1], columns, subsequent_indent=indent) or [head.rstrip()]


def _value(path: str, checked: CheckedConfig) -> str:
    """Return the value that a run would use."""
    node = checked.node
    try:
        value: Any = OmegaConf.select(node, path) if node is not None else checked.merge.value(path)
    except OmegaConfBaseException:
        value = checked.merge.value(path)
    if OmegaConf.is_dict(value) and (spec := checked.merge.spec(path)) is not None and spec.is_section:
        return "..."
    return _format(OmegaConf.to_container(value, enum_to_str=True) if OmegaConf.is_config(value) else value)


def _format(value: Any) -> str:
    """Format a value as on the command line, with quotes around blank text."""
    return repr(value) if isinstance(value, str) and not value.strip() else show(value)
