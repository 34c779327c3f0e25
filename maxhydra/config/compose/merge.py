"""Key-by-key merge of option files and overrides, with the origin of every value and all problems at once.

Hydra stops at the first mistake. `ConfigMerge` merges in the same order, checks each value against the schema as it is
set, leaves out a value that does not fit, and continues, so that one error message lists every problem.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override

from maxhydra.config.compose.provenance import COMMAND_LINE, SourcedValue
from maxhydra.config.declare import MISSING
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.fields import FieldType, fields, is_open, walk
from maxhydra.config.migrations import migrate_key
from maxhydra.config.option_types import dicts_of_sections, new_node, schema_node, set_section_type
from maxhydra.config.registry import GLOBAL, groups, task_schemas
from maxhydra.config.schema.config import Config

DEFAULT = "the schema's default"


class ConfigMerge:
    """Layers of values over the schema's defaults.

    `problems` lists the mistakes so far. `unsure` holds the paths whose value is unknown because of one: a value that
    was rejected, or a section whose option does not exist. Nothing under these paths is checked any further.
    `is_exact` is false after a layer that Hydra merges in another way, such as an interpolation in place of a section.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.unsure: set[str] = set()
        self.is_exact = True
        self._types: dict[str, type] = {"": Config}
        self._tree: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._removed: set[str] = set()
        self._required: dict[str, str] = {}

    def set_type(self, path: str, cls: type) -> None:
        """Give the section at `path` the fields of a subclass of its declared type."""
        # In Hydra, the defaults of the class would override the values that were set before it.
        self.is_exact &= not self._subtree(path)
        self._types[path] = cls

    def set_option_types(self, types: Mapping[str, type | Problem]) -> None:
        """Give sections the fields of objects of the user; the keys of one that cannot be imported are not checked."""
        for path, cls in types.items():
            if isinstance(cls, Problem):
                self.problems.append(cls)
                self.unsure.add(path)
            else:
                self.set_type(path, cls)

    def set_value(self, path: str, sourced: SourcedValue) -> None:
        """Set a value, or every value of a section, over the current one."""
        value, spec = sourced.value, self.spec(path)
        if spec is None:
            if not self._is_unsure(path):
                self.problems.append(self.unknown(path, sourced))
        elif value == MISSING:
            self._required[path] = sourced.source
        elif is_open(value):
            self.is_exact &= not (spec.is_section or spec.type is dict)
            self._set_leaf(path, sourced)
        elif spec.is_section or spec.type is dict:
            self._set_entries(path, sourced, spec)
        elif reason := spec.mismatch(value):
            self._reject(path, sourced, reason, spec)
        else:
            self._set_leaf(path, sourced)

    def _set_entries(self, path: str, sourced: SourcedValue, spec: FieldType) -> None:
        if not isinstance(sourced.value, dict):
            kind = "a section of keys" if spec.is_section else "a mapping of names to values"
            self._reject(path, sourced, f"is {kind}, not a single value", spec)
            return
        self._node(path)  # creates the entry even if it has no values
        if spec.type is dict:
            self._origins[path] = sourced.source
        for key, item in sourced.value.items():
            full_path = f"{path}.{key}" if path else key
            if "." in key:
                hint = "in YAML, write every part of a path as its own nested key"
                self.problems.append(Problem(full_path, "a key with a dot", item.plain, hint=hint, source=item.source))
            else:
                self.set_value(full_path, item)

    def _reject(self, path: str, sourced: SourcedValue, reason: str, spec: FieldType) -> None:
        self.unsure.add(path)
        hint = ""
        if isinstance(sourced.value, str):
            hint = did_you_mean(sourced.value, spec.names)
        elif isinstance(sourced.value, bool) and {"on", "off", "yes", "no"} & set(spec.names):
            hint = "YAML parses on, off, yes and no as booleans: put the word in quotes"
        self.problems.append(Problem(path, reason, sourced.plain, spec.accepted, hint, sourced.source))

    def check_required(self) -> None:
        """Reject values that are still `???`. OmegaConf would silently keep the value of the layer below."""
        for path, source in self._required.items():
            spec = self.spec(path)
            assert spec is not None
            self._reject(path, SourcedValue(MISSING, source), "a value is needed", spec)

    def _set_leaf(self, path: str, sourced: SourcedValue) -> None:
        parent, _, name = path.rpartition(".")
        for required in [required for required in self._required if f"{path}.".startswith(f"{required}.")]:
            del self._required[required]
        spec = self.spec(parent)
        if spec is not None and spec.type is list:
            items = self.value(parent)
            if int(name) >= len(items):
                self._reject(path, sourced, f"{parent} has {len(items)} items", spec)
                return
            self._node(parent.rpartition(".")[0])[parent.rpartition(".")[2]] = [
                sourced.value if index == int(name) else item for index, item in enumerate(items)
            ]
        else:
            self._node(parent)[name] = sourced.plain
            self._removed.discard(path)
        self._origins[path] = sourced.source

    def _node(self, path: str) -> dict[str, Any]:
        """Return the subtree at a path of sections and dicts, creating it if needed."""
        node = self._tree
        for name in path.split(".") if path else []:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        return node

    def _subtree(self, path: str) -> dict[str, Any]:
        """Return the values set so far at a path, without creating anything."""
        node: Any = self._tree
        for name in path.split(".") if path else []:
            node = node.get(name) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else {}

    def value(self, path: str) -> Any:
        """Return the value at a path as it was written, or the schema's default."""
        parent, _, name = path.rpartition(".")
        node, spec = self._subtree(parent), self.spec(parent)
        if name in node or spec is None or not spec.is_section:
            return node.get(name)
        return fields(spec.type)[name].default

    def remove(self, path: str) -> None:
        """Remove an entry from its dict."""
        parent, _, name = path.rpartition(".")
        self._node(parent).pop(name, None)
        self._removed.add(path)

    def spec(self, path: str) -> FieldType | None:
        """Return the schema's type of a path, or None if it has no such key."""
        spec, prefix = FieldType(type=self._types[""], optional=False, bounds={}), ""
        for name in path.split(".") if path else []:
            prefix = f"{prefix}.{name}" if prefix else name
            if spec.is_section and name in fields(spec.type):
                spec = fields(spec.type)[name].spec
            elif spec.type is dict or (spec.type is list and name.isdigit()):
                assert spec.item is not None
                spec = spec.item
            else:
                return None
            if prefix in self._types:
                spec = FieldType(type=self._types[prefix], optional=False, bounds={})
        return spec

    def names(self, path: str) -> list[str]:
        """Return the fields of a section, or the entries that a dict has so far."""
        spec = self.spec(path)
        if spec is None:
            return []
        if spec.is_section:
            return list(fields(spec.type))
        parent, _, name = path.rpartition(".")
        outer = self.spec(parent)
        default = fields(outer.type)[name].default if outer is not None and outer.is_section else {}
        return [
            name for name in dict.fromkeys([*default, *self._subtree(path)]) if f"{path}.{name}" not in self._removed
        ]

    def new_entry(self, path: str) -> str:
        """Return the first prefix of a path that is a dict entry which does not exist yet, or an empty string."""
        names = path.split(".")
        for depth in range(1, len(names)):
            parent = ".".join(names[:depth])
            spec = self.spec(parent)
            if spec is not None and spec.type is dict and names[depth] not in self.names(parent):
                return f"{parent}.{names[depth]}"
        return ""

    def origin(self, path: str) -> str:
        """Return where the value at a path was set; a list item has the origin of its list."""
        parent = path.rpartition(".")[0]
        spec = self.spec(parent)
        if path not in self._origins and spec is not None and spec.type is list:
            return self.origin(parent)
        return self._origins.get(path, DEFAULT)

    def unknown(self, path: str, sourced: SourcedValue) -> Problem:
        """Return the problem of a key that the schema does not have, with its new name or the nearest known key."""
        names = path.split(".")
        depth = next(depth for depth in range(len(names)) if self.spec(".".join(names[: depth + 1])) is None)
        parent, name = ".".join(names[:depth]), names[depth]
        choices = self.names(parent) if parent else [*self.names(""), *groups()]
        hint = self._renamed(path) or self._pitfall(parent, name, sourced) or self._nearest(parent, name, choices)
        accepted = ", ".join(dict.fromkeys(choices)) or "no keys"
        return Problem(path, "no such key", sourced.plain, accepted, hint, sourced.source)

    def _renamed(self, path: str) -> str:
        current = migrate_key(path)
        is_known = current != path and self.spec(current) is not None
        return f"{path} was renamed to {current}" if is_known else ""

    def _pitfall(self, parent: str, name: str, sourced: SourcedValue) -> str:
        if not parent and name in groups() and sourced.source != COMMAND_LINE:
            return f"to set keys outside {name}, start the file with the line `# {GLOBAL}`"
        tasks = [task for task, cls in task_schemas().items() if parent == "task" and name in fields(cls)]
        return f"task={', '.join(tasks)} {'has' if len(tasks) == 1 else 'have'} this key" if tasks else ""

    def _nearest(self, parent: str, name: str, choices: list[str]) -> str:
        """Suggest a similar key of the section, then the same name elsewhere, then any similar path."""
        prefix = f"{parent}." if parent else ""
        paths = [path for path, _ in walk(Config)]
        same = [path for path in paths if path.rpartition(".")[2] == name]
        return did_you_mean(prefix + name, [prefix + choice for choice in choices]) or (
            f"did you mean {same[0]!r}?" if same else did_you_mean(prefix + name, paths)
        )

    def _is_unsure(self, path: str) -> bool:
        return any(path == other or path.startswith(f"{other}.") for other in self.unsure)

    def _add_entries(self, node: DictConfig) -> None:
        """Add the sections of dicts that have values; OmegaConf would build each from its class, which takes longer."""
        with flag_override(node, "no_deepcopy_set_nodes", True):
            for path, cls in dicts_of_sections().items():
                for name, values in self._subtree(path).items():
                    if isinstance(values, dict) and name not in (entries := OmegaConf.select(node, path)):
                        entries[name] = new_node(cls)

    def config(self) -> DictConfig:
        """Return the merged values as an OmegaConf node of the schema's types."""
        node = new_node(Config)
        for path, cls in self._types.items():
            if path:
                set_section_type(node, path, schema_node(cls))
        self._add_entries(node)
        merged = OmegaConf.unsafe_merge(node, OmegaConf.create(self._tree))  # modifies both
        assert isinstance(merged, DictConfig)
        for path in self._removed:
            parent, _, name = path.rpartition(".")
            OmegaConf.select(merged, parent).pop(name, None)
        return merged
