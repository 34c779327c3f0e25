"""Generator of docs/config.md, the reference of all keys: `python -m maxhydra.config.docs`."""

from collections.abc import Iterable, Iterator

from maxhydra.config.declare import MISSING
from maxhydra.config.errors import show
from maxhydra.config.fields import Field, FieldType, fields
from maxhydra.config.registry import PACKAGE, task_schemas
from maxhydra.config.schema.config import Config
from maxhydra.config.schema.run import Task

PATH = PACKAGE.parent / "docs" / "config.md"

HEAD = """\
# Config reference

All keys, generated from the schema by `python -m maxhydra.config.docs`. Set a key on the command line as
`maxhydra train.steps=1000`; `maxhydra explain train.steps` also shows where its value comes from. A `*` in a path is a
name that you choose. A key without a default is set by the options in `conf/` or on the command line. A value on the
command line that would have no effect, such as `reward.workers=2` with `task=sft`, is an error that names what uses it.
"""


def reference() -> str:
    """Return the page."""
    parts = [HEAD, *_section("", Config)]
    tasks_of: dict[tuple[str, type], list[str]] = {}
    for name, cls in task_schemas().items():
        extra = [field for key, field in fields(cls).items() if key not in fields(Task)]
        keys = [field for field in extra if not field.spec.is_section]
        parts += [f"## `task`, with `task={name}`\n", f"{cls.__doc__}\n", *([_table("task", keys)] if keys else [])]
        for field in extra:
            if field.spec.is_section:
                tasks_of.setdefault((field.name, field.spec.type), []).append(f"`task={name}`")
    for (name, cls), tasks in tasks_of.items():
        parts += _section(f"task.{name}", cls, note=f", with {', '.join(tasks)}")
    return "\n".join(parts)


def _section(path: str, cls: type, *, note: str = "") -> Iterator[str]:
    """Yield the table of a section's keys, then its subsections; `note` follows the path in the headings."""
    keys = [field for field in fields(cls).values() if not field.spec.is_section]
    if not fields(cls):
        return
    if path:
        yield f"## `{path}`{note}\n"
        yield f"{' '.join((cls.__doc__ or '').split())}\n"
    if keys:
        yield _table(path, keys)
    for field in fields(cls).values():
        full_path = f"{path}.{field.name}" if path else field.name
        if field.spec.is_section:
            yield from _section(full_path, field.spec.type, note=note)
        elif field.spec.item is not None and field.spec.item.is_section:
            yield from _section(f"{full_path}.*", field.spec.item.type, note=note)


def _table(path: str, keys: Iterable[Field]) -> str:
    rows = ["| key | type | default | accepted | meaning |", "|---|---|---|---|---|"]
    for field in keys:
        name = f"{path}.{field.name}" if path else field.name
        default = "" if field.default == MISSING else f"`{_code(show(field.default))}`"
        cells = [f"`{name}`", f"`{field.spec}`", default, _accepted(field.spec), field.doc]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _accepted(spec: FieldType) -> str:
    """Return the accepted values as in messages; plug-ins by package, so that a new one does not change the page."""
    bounded = spec.item if spec.item is not None and not spec.item.is_section else spec
    if "one_of" in bounded.bounds:
        return f"modules of {bounded.bounds['one_of']}"
    return "a section each" if spec.item is not None and spec.item.is_section else spec.accepted


def _code(text: str) -> str:
    return text.encode("unicode_escape").decode()


if __name__ == "__main__":
    PATH.write_text(reference(), encoding="utf-8")
