"""Schema introspection: type, bounds, default and docs of every key, and validation of values."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import BooleanNode, EnumNode, FloatNode, IntegerNode, StringNode, ValidationError, ValueNode

from maxhydra.config.declare import PlugInUse, Schema, field_docs
from maxhydra.config.errors import show
from maxhydra.config.plug_ins import PLUG_IN, PLUG_IN_FORM
from maxhydra.config.registry import modules

NODES: dict[type, Callable[[], ValueNode]] = {bool: BooleanNode, int: IntegerNode, float: FloatNode, str: StringNode}
NOUNS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
COMPARISONS = {
    "ge": ("{} or more", lambda value, bound: value >= bound),
    "gt": ("over {}", lambda value, bound: value > bound),
    "le": ("at most {}", lambda value, bound: value <= bound),
    "lt": ("under {}", lambda value, bound: value < bound),
}


@dataclasses.dataclass(frozen=True)
class FieldType:
    """Type of a value: a scalar, an enum, a list or dict of `item`, or a section (a schema class)."""

    type: type
    optional: bool
    bounds: Mapping[str, Any]
    item: "FieldType | None" = None

    @property
    def is_section(self) -> bool:
        return issubclass(self.type, Schema)

    @property
    def plug_in(self) -> PlugInUse | None:
        """Where the object is called that a value, or an item of a list, may name; None if it cannot name one."""
        return self.bounds.get("plug_in") if self.item is None else self.item.plug_in

    @property
    def names(self) -> list[str]:
        """The accepted names, if the type has a fixed set of them."""
        if issubclass(self.type, Enum):
            return [member.name for member in self.type]
        return modules(self.bounds["one_of"]) if "one_of" in self.bounds else []

    def __str__(self) -> str:
        """Return a short name of the type."""
        if self.item is not None:
            name = f"list[{self.item}]" if self.type is list else f"dict[str, {self.item}]"
        else:
            name = "enum" if issubclass(self.type, Enum) else self.type.__name__
        return f"{name} | null" if self.optional else name

    @property
    def accepted(self) -> str:
        """Description of the accepted values."""
        if self.is_section:
            return f"a section with {', '.join(fields(self.type))}" if fields(self.type) else "an empty section"
        if self.type is list:
            assert self.item is not None
            return f"a list, each item {self.item.accepted}"
        if self.type is dict:
            assert self.item is not None
            return f"a mapping of names to {self.item.accepted}"
        null = ", or null" if self.optional else ""
        if self.names or "one_of" in self.bounds:
            return ", ".join([*self.names, *([PLUG_IN_FORM] if self.plug_in else [])]) + null
        if self.plug_in:
            return PLUG_IN_FORM + null
        limits = [
            COMPARISONS[name][0].format(f"{bound:g}" if isinstance(bound, float) else bound)
            for name, bound in self.bounds.items()
        ]
        return ", ".join([NOUNS[self.type], *([" and ".join(limits)] if limits else [])]) + null

    def mismatch(self, value: Any) -> str:
        """Return why a value is rejected, or an empty string; uses OmegaConf's own conversion so that both agree."""
        if value is None:
            return "" if self.optional else "cannot be null"
        if self.type is list:
            assert self.item is not None
            if not isinstance(value, list):
                return "is not a list"
            reasons = ((item, self.item.mismatch(item)) for item in value if not is_open(item))
            return next((f"the item {show(item)} {reason}" for item, reason in reasons if reason), "")
        try:
            node = EnumNode(self.type) if issubclass(self.type, Enum) else NODES[self.type]()
            converted = node.validate_and_convert(value)
        except ValidationError:
            return "is not one of the accepted names" if self.names else f"is not {NOUNS[self.type]}"
        if self.plug_in and ":" in converted:
            return "" if PLUG_IN.fullmatch(converted) else "is not the path of an object"
        if "one_of" in self.bounds:
            return "" if converted in self.names else "is not one of the accepted names"
        if self.plug_in:
            return "is not the path of an object"
        return self.number_mismatch(converted)

    def number_mismatch(self, value: Any) -> str:
        """Return why a value that already has this type is rejected, or an empty string."""
        if isinstance(value, float) and not math.isfinite(value):
            return "is not finite"
        within = all(COMPARISONS[name][1](value, bound) for name, bound in self.bounds.items())
        return "" if within else "is out of range"


@dataclasses.dataclass(frozen=True)
class Field:
    """A key of a section; `owner` is its schema class."""

    name: str
    spec: FieldType
    default: Any
    owner: type

    @property
    def doc(self) -> str:
        """The docstring under the field, read from the source file, or the class docstring if it is a section."""
        doc = self.spec.type.__doc__ if self.spec.is_section else field_docs(self.owner).get(self.name)
        return " ".join((doc or "").split())


def fields(cls: type) -> dict[str, Field]:
    """Return the keys of a schema class, in order."""
    return _fields(cls)


@cache
def _fields(cls: type) -> dict[str, Field]:
    hints = typing.get_type_hints(cls)
    result: dict[str, Field] = {}
    for field in dataclasses.fields(cls):
        spec = _spec(hints[field.name], field.metadata)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        result[field.name] = Field(field.name, spec, default, cls)
    return result


def _spec(annotation: Any, bounds: Mapping[str, Any]) -> FieldType:
    """Return the type of an annotation; bounds of a list or dict apply to its items."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType:
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return dataclasses.replace(_spec(inner, bounds), optional=True)
    if origin in (list, dict):
        return FieldType(type=origin, optional=False, bounds={}, item=_spec(arguments[-1], bounds))
    return FieldType(type=annotation, optional=False, bounds=bounds)


def is_open(value: Any) -> bool:
    """Return whether a value is only known after composition: an interpolation, or `???`."""
    return isinstance(value, str) and ("${" in value or value == "???")


def walk(cls: type, path: str = "") -> Iterator[tuple[str, Field]]:
    """Yield every key under a schema class with its path, sections before their keys; `*` is any entry of a dict."""
    for field in fields(cls).values():
        full_path = f"{path}.{field.name}" if path else field.name
        yield full_path, field
        if field.spec.is_section:
            yield from walk(field.spec.type, full_path)
        elif field.spec.item is not None and field.spec.item.is_section:
            yield from walk(field.spec.item.type, f"{full_path}.*")
