"""Say what a key, section or group means and where its value came from: explain PATH [overrides].

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
from maxhydra.config.compose.composer import CheckedConfig, Composer
from maxhydra.config.compose.overrides import absent, searchpath
from maxhydra.config.compose.provenance import SourcedValue
from maxhydra.config.declare import MISSING
from maxhydra.config.errors import UNSET, ConfigError, show
from maxhydra.config.fields import Field, FieldType, fields
from maxhydra.config.registry import description

WIDEST = 30


def main(arguments: list[str]) -> int:
    """Explain, and then list what is wrong with the config: a key is looked up most when it does not work."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    asked = flags.parse(arguments)
    # Shell completion ends a key with `=` and a section with a dot.
    path = asked.overrides[0].rstrip("=.") if asked.overrides else ""
    composer = Composer(asked.config_dir, asked.config_name, searchpath(asked.overrides))
    examination = composer.examine(asked.overrides[1:], with_hydra=False)
    if problem := absent(examination.assembly, path, examination.assembly.new_entry(path)):
        raise ConfigError(problem)
    lines = list(_explain(path, composer, examination))
    if not lines:
        raise ConfigError(examination.assembly.unknown(path, SourcedValue(UNSET, "")))
    print("\n".join(lines), flush=True)
    examination.composed()
    return 0


def _explain(path: str, composer: Composer, examination: CheckedConfig) -> Iterator[str]:
    """A path may be a key, a section, a group, or the latter two at once."""
    options = composer.groups.options(path) if path else []
    key = path.replace("/", ".") if options else path
    spec, field = examination.assembly.spec(key), _field(key, examination)
    if spec is not None and path:
        yield f"{key}: {field.doc if field else 'an entry of ' + key.rpartition('.')[0]}"
    if options:
        yield f"options of the group {path} ({examination.choices.get(path, 'none')} is chosen):"
        files = {option: composer.file(f"{path}/{option}") for option in options}
        yield from _columns((option, description(file) if file else "") for option, file in files.items())
    if spec is not None and spec.is_section:
        yield "keys:"
        names = {name: f"{key}.{name}" if key else name for name in fields(spec.type)}
        yield from _columns(
            (name, _value(names[name], examination), item.doc) for name, item in fields(spec.type).items()
        )
    elif spec is not None:
        yield from _columns(_facts(key, spec, field, examination))


def _facts(key: str, spec: FieldType, field: Field | None, examination: CheckedConfig) -> Iterator[tuple[str, str]]:
    yield "type", str(spec)
    yield "accepted", spec.accepted
    if field is not None:
        yield "default", "none: a value is needed" if field.default == MISSING else _shown(field.default)
    yield "value", _value(key, examination)
    yield "set in", examination.assembly.origin(key)


def _field(path: str, examination: CheckedConfig) -> Field | None:
    parent, _, name = path.rpartition(".")
    spec = examination.assembly.spec(parent)
    return fields(spec.type).get(name) if spec is not None and spec.is_section else None


def _columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Cells under one another, the last one wrapped to the terminal."""
    table = list(rows)
    columns = max(shutil.get_terminal_size((110, 24)).columns, 80)
    widths = [min(WIDEST, max(map(len, cells))) for cells in zip(*table, strict=True)][:-1]
    indent = " " * (2 + sum(widths) + 2 * len(widths))
    for row in table:
        head = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        yield from textwrap.wrap(head + row[-1], columns, subsequent_indent=indent) or [head.rstrip()]


def _value(path: str, examination: CheckedConfig) -> str:
    """The value that a run would have."""
    node = examination.node
    try:
        value: Any = OmegaConf.select(node, path) if node is not None else examination.assembly.value(path)
    except OmegaConfBaseException:
        value = examination.assembly.value(path)
    if OmegaConf.is_dict(value) and (spec := examination.assembly.spec(path)) is not None and spec.is_section:
        return "..."
    return _shown(OmegaConf.to_container(value, enum_to_str=True) if OmegaConf.is_config(value) else value)


def _shown(value: Any) -> str:
    """As on the command line; text that one would not see in quotes."""
    return repr(value) if isinstance(value, str) and not value.strip() else show(value)
