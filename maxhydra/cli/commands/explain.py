"""Say what a key, section or group means and where its value came from: explain PATH [overrides].

maxhydra explain optimizer.learning_rate
maxhydra explain train.steps experiment=shakespeare
maxhydra explain model
"""

import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maxhydra.cli import flags
from maxhydra.config.compose import Composer, Examination
from maxhydra.config.discover import description
from maxhydra.config.errors import UNSET, ConfigError, show
from maxhydra.config.located import Located
from maxhydra.config.spec import Field, fields


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    asked = flags.parse(arguments)
    # Shell completion ends a key with `=`.
    path = asked.overrides[0].rstrip("=.") if asked.overrides else ""
    composer = Composer(asked.config_dir, asked.config_name)
    examination = composer.examine(asked.overrides[1:], with_hydra=False)
    lines = list(_explain(path, composer, examination))
    if not lines:
        raise ConfigError(examination.assembly.unknown(path, Located(UNSET, "")))
    print("\n".join(lines))
    sys.stdout.flush()
    examination.composed()
    return 0


def _explain(path: str, composer: Composer, examination: Examination) -> Iterator[str]:
    options = composer.groups.options(path) if path else []
    key = path.replace("/", ".") if options else path
    field = _field(key, examination)
    if field is not None:
        yield f"{key}: {field.doc}"
    if options:
        yield from _options(path, options, composer, examination)
    spec = examination.assembly.spec(key)
    if spec is not None and spec.is_section:
        yield from _table(
            {name: f"{_value(_join(key, name), examination)}\t{item.doc}" for name, item in fields(spec.type).items()}
        )
    elif field is not None:
        origin = examination.assembly.origin(key)
        yield f"  type      {field.spec}"
        yield f"  accepted  {field.spec.accepted}"
        yield f"  default   {'none, a value is needed' if field.default == '???' else show(field.default)}"
        yield f"  value     {_value(key, examination)}"
        yield f"  set in    {origin}"
    elif spec is not None:
        yield f"{key}: an entry of {key.rpartition('.')[0]}"
        yield f"  type      {spec}"
        yield f"  accepted  {spec.accepted}"
        yield f"  value     {_value(key, examination)}"
        yield f"  set in    {examination.assembly.origin(key)}"


def _field(path: str, examination: Examination) -> Field | None:
    parent, _, name = path.rpartition(".")
    spec = examination.assembly.spec(parent)
    return fields(spec.type).get(name) if spec is not None and spec.is_section else None


def _options(group: str, options: list[str], composer: Composer, examination: Examination) -> Iterator[str]:
    chosen = examination.choices.get(group, "none")
    yield f"options of the group {group} ({chosen} is chosen):"
    files = {option: composer.file(f"{group}/{option}") for option in options}
    yield from _table({option: description(path) if path else "" for option, path in files.items()})
    yield ""


def _table(rows: dict[str, str]) -> Iterator[str]:
    """Name, value and doc in columns; a row without a value has none."""
    cells = {name: row.split("\t") for name, row in rows.items()}
    widths = [max(map(len, rows), default=0), max((len(row[0]) for row in cells.values() if len(row) > 1), default=0)]
    widths[1] = min(widths[1], 30)
    columns = shutil.get_terminal_size((110, 24)).columns
    for name, row in cells.items():
        value = f"{row[0]:<{widths[1]}}  " if len(row) > 1 else ""
        head = f"  {name:<{widths[0]}}  {value}"
        indent = " " * (widths[0] + widths[1] + 6 if len(row) > 1 else widths[0] + 4)
        lines = textwrap.wrap(head + row[-1], max(columns, 80), subsequent_indent=indent, drop_whitespace=True)
        yield from lines or [head.rstrip()]


def _value(path: str, examination: Examination) -> str:
    """The value that a run would have."""
    node = examination.node
    try:
        value: Any = OmegaConf.select(node, path, throw_on_missing=False) if node is not None else None
    except OmegaConfBaseException:
        value = examination.assembly.value(path)
    if OmegaConf.is_config(value):
        spec = examination.assembly.spec(path)
        value = "..." if spec is not None and spec.is_section else OmegaConf.to_container(value, enum_to_str=True)
    return repr(value) if isinstance(value, str) and not value.strip() else show(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
