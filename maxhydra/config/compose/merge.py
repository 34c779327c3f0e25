"""The config assembled key by key, in the order in which Hydra merges, with the origin of every value.

Hydra stops at the first mistake; this goes on to the last. Each value is held against the schema as it is placed: one
that does not fit becomes a problem and is left out, and the rest stands, to be checked further.
"""

from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.compose.provenance import COMMAND_LINE, SourcedValue
from maxhydra.config.declare import MISSING
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.fields import FieldType, fields, is_open, walk
from maxhydra.config.migrations import migrate_key
from maxhydra.config.registry import GLOBAL, groups, task_schemas
from maxhydra.config.schema.config import Config

DEFAULT = "the schema's default"


class ConfigMerge:
    """Layers of values over the schema's defaults.

    `problems` are those found so far, `unsure` the paths whose value is not what the user meant: a value that was left
    out, or a section whose option does not exist. What lies under them is not judged.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.unsure: set[str] = set()
        self._types: dict[str, type] = {"": Config}
        self._tree: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._removed: set[str] = set()
        self._awaited: dict[str, str] = {}

    def set_type(self, path: str, cls: type) -> None:
        """The section at `path` has the fields of a subclass."""
        self._types[path] = cls

    def place(self, path: str, located: SourcedValue) -> None:
        """Set a value, or each value of a section, over what stands there."""
        value, spec = located.value, self.spec(path)
        if spec is None:
            if not self._is_unsure(path):
                self.problems.append(self.unknown(path, located))
        elif value == MISSING:
            self._awaited[path] = located.source
        elif is_open(value):
            self._set(path, located)
        elif spec.is_section or spec.type is dict:
            self._place_names(path, located, spec)
        elif reason := spec.mismatch(value):
            self._refuse(path, located, reason, spec)
        else:
            self._set(path, located)

    def _place_names(self, path: str, located: SourcedValue, spec: FieldType) -> None:
        if not isinstance(located.value, dict):
            what = "is a section" if spec.is_section else "holds names with values"
            self._refuse(path, located, f"{what} and takes no single value", spec)
            return
        self._node(path)  # a name without values is an entry too
        if spec.type is dict:
            self._origins[path] = located.source
        for key, item in located.value.items():
            here = f"{path}.{key}" if path else key
            if "." in key:
                hint = "in YAML every part of a path is a key of its own, one under the other"
                self.problems.append(Problem(here, "a key with a dot", item.plain, hint=hint, source=item.source))
            else:
                self.place(here, item)

    def _refuse(self, path: str, located: SourcedValue, reason: str, spec: FieldType) -> None:
        self.unsure.add(path)
        hint = ""
        if isinstance(located.value, str):
            hint = did_you_mean(located.value, spec.names)
        elif isinstance(located.value, bool) and {"on", "off", "yes", "no"} & set(spec.names):
            hint = "YAML reads on, off, yes and no as true and false: put the word in quotes"
        self.problems.append(Problem(path, reason, located.plain, spec.accepted, hint, located.source))

    def demand(self) -> None:
        """Refuse what was written as ??? and never given. OmegaConf would keep the value below it."""
        for path, source in self._awaited.items():
            spec = self.spec(path)
            assert spec is not None
            self._refuse(path, SourcedValue(MISSING, source), "a value is needed", spec)

    def _set(self, path: str, located: SourcedValue) -> None:
        parent, _, name = path.rpartition(".")
        for waiting in [waiting for waiting in self._awaited if f"{path}.".startswith(f"{waiting}.")]:
            del self._awaited[waiting]
        spec = self.spec(parent)
        if spec is not None and spec.type is list:
            items = self.value(parent)
            if int(name) >= len(items):
                self._refuse(path, located, f"{parent} has {len(items)} items", spec)
                return
            self._node(parent.rpartition(".")[0])[parent.rpartition(".")[2]] = [
                located.value if index == int(name) else item for index, item in enumerate(items)
            ]
        else:
            self._node(parent)[name] = located.plain
            self._removed.discard(path)
        self._origins[path] = located.source

    def _node(self, path: str) -> dict[str, Any]:
        """The part of the tree at a path of sections and dicts, made where nothing stands yet."""
        node = self._tree
        for name in path.split(".") if path else []:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        return node

    def _written(self, path: str) -> dict[str, Any]:
        """The same for reading: what stands there, or nothing."""
        node: Any = self._tree
        for name in path.split(".") if path else []:
            node = node.get(name) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else {}

    def value(self, path: str) -> Any:
        """The value at a path as it was written, or the schema's default."""
        parent, _, name = path.rpartition(".")
        node, spec = self._written(parent), self.spec(parent)
        if name in node or spec is None or not spec.is_section:
            return node.get(name)
        return fields(spec.type)[name].default

    def remove(self, path: str) -> None:
        """Take a name out of its dict."""
        parent, _, name = path.rpartition(".")
        self._node(parent).pop(name, None)
        self._removed.add(path)

    def spec(self, path: str) -> FieldType | None:
        """What the schema says about a path, None where it has no such key."""
        spec, here = FieldType(type=self._types[""], optional=False, bounds={}), ""
        for name in path.split(".") if path else []:
            here = f"{here}.{name}" if here else name
            if spec.is_section and name in fields(spec.type):
                spec = fields(spec.type)[name].spec
            elif spec.type is dict or (spec.type is list and name.isdigit()):
                assert spec.item is not None
                spec = spec.item
            else:
                return None
            if here in self._types:
                spec = FieldType(type=self._types[here], optional=False, bounds={})
        return spec

    def names(self, path: str) -> list[str]:
        """The names that stand at a path: fields of a section, or those that a dict has so far."""
        spec = self.spec(path)
        if spec is None:
            return []
        if spec.is_section:
            return list(fields(spec.type))
        parent, _, name = path.rpartition(".")
        outer = self.spec(parent)
        default = fields(outer.type)[name].default if outer is not None and outer.is_section else {}
        return [
            name for name in dict.fromkeys([*default, *self._written(path)]) if f"{path}.{name}" not in self._removed
        ]

    def new_entry(self, path: str) -> str:
        """The first part of a path that is a name not yet in its dict, or nothing."""
        names = path.split(".")
        for depth in range(1, len(names)):
            parent = ".".join(names[:depth])
            spec = self.spec(parent)
            if spec is not None and spec.type is dict and names[depth] not in self.names(parent):
                return f"{parent}.{names[depth]}"
        return ""

    def origin(self, path: str) -> str:
        """Where the value at a path was set; an item of a list was set with the list."""
        parent = path.rpartition(".")[0]
        spec = self.spec(parent)
        if path not in self._origins and spec is not None and spec.type is list:
            return self.origin(parent)
        return self._origins.get(path, DEFAULT)

    def unknown(self, path: str, located: SourcedValue) -> Problem:
        """A key that the schema does not have, with the nearest that it has."""
        names = path.split(".")
        depth = next(depth for depth in range(len(names)) if self.spec(".".join(names[: depth + 1])) is None)
        parent, name = ".".join(names[:depth]), names[depth]
        choices = self.names(parent) if parent else [*self.names(""), *groups()]
        hint = self._renamed(path) or self._pitfall(parent, name, located) or self._nearest(parent, name, choices)
        accepted = ", ".join(dict.fromkeys(choices)) or "nothing here"
        return Problem(path, "no such key", located.plain, accepted, hint, located.source)

    def _renamed(self, path: str) -> str:
        current = migrate_key(path)
        is_known = current != path and self.spec(current) is not None
        return f"{path} was renamed to {current}" if is_known else ""

    def _pitfall(self, parent: str, name: str, located: SourcedValue) -> str:
        if not parent and name in groups() and located.source != COMMAND_LINE:
            return f"to set keys outside {name}, begin the file with the line `# {GLOBAL}`"
        tasks = [task for task, cls in task_schemas().items() if parent == "task" and name in fields(cls)]
        return f"task={tasks[0]} has it" if tasks else ""

    def _nearest(self, parent: str, name: str, choices: list[str]) -> str:
        """In the section first, then the same name elsewhere, then anything alike."""
        prefix = f"{parent}." if parent else ""
        paths = [path for path, _ in walk(Config)]
        same = [path for path in paths if path.rpartition(".")[2] == name]
        return did_you_mean(prefix + name, [prefix + choice for choice in choices]) or (
            f"did you mean {same[0]!r}?" if same else did_you_mean(prefix + name, paths)
        )

    def _is_unsure(self, path: str) -> bool:
        return any(path == other or path.startswith(f"{other}.") for other in self.unsure)

    def config(self) -> DictConfig:
        """What stands, as OmegaConf holds it."""
        merged = OmegaConf.merge(_defaults(tuple(self._types.items())), OmegaConf.create(self._tree))
        assert isinstance(merged, DictConfig)
        for path in self._removed:
            parent, _, name = path.rpartition(".")
            OmegaConf.select(merged, parent).pop(name, None)
        return merged


@cache
def _defaults(types: tuple[tuple[str, type], ...]) -> DictConfig:
    """The schema with these types in their places, made once: OmegaConf takes long, and a merge copies it."""
    node = OmegaConf.structured(Config)
    for path, cls in types:
        if path:
            OmegaConf.update(node, path, OmegaConf.structured(cls))
    assert isinstance(node, DictConfig)
    return node
