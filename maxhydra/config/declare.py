"""Declaration of schema classes: write-once dataclasses with bounds and a docstring per field.  OmegaConf makes nodes
of a frozen dataclass read-only, which would forbid overrides. Schema classes are therefore ordinary dataclasses whose
attributes can be assigned once: Hydra can override them, and instances are immutable."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any, TypeVar, dataclass_transform

from maxhydra.config.errors import Problem

T = TypeVar("T")


class PlugInUse(Enum):
    """Where an object of the user is called: by this process, or by separate worker processes."""

    here = "here"
    worker = "worker"


# OmegaConf's marker of a required value, without importing OmegaConf, so that the schema imports in milliseconds.
MISSING: Any = "???"

# Upper bounds of a model's sizes, at least ten times those of any published model. A larger value is a mistake, which
# is reported instead of filling the memory.
MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_EXPERTS = 10_000, 2**22, 2**14, 2**16
MAX_VOCABULARY, MAX_CONTEXT, MAX_PARAMETERS = 2**24, 2**31 - 1, 10**14


def option(
    default: Any = MISSING,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    one_of: str | None = None,
    plug_in: PlugInUse | None = None,
) -> Any:
    """Declare a field with a default and accepted values: numeric bounds, or the modules of a package (`one_of`).

    `plug_in`: the value can be `package.module:object`; the section `options` next to it holds the object's settings.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt, "one_of": one_of, "plug_in": plug_in}
    metadata = {name: bound for name, bound in bounds.items() if bound is not None}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type[T]) -> T:
    """Declare a nested section with the defaults of its class."""
    return dataclasses.field(default_factory=cls)  # type: ignore[return-value]


class Schema:
    """Base of schema classes: attributes can be assigned once, and `check` yields cross-field problems."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}: the config is final")
        object.__setattr__(self, name, value)

    def check(self) -> Iterator[Problem]:
        """Yield problems between fields of this class; paths are relative to it."""
        return iter(())


@dataclass_transform(kw_only_default=True, field_specifiers=(option, section, dataclasses.field))
def schema(cls: type[T]) -> type[T]:
    """Declare a schema class (which derives from `Schema`)."""
    return dataclasses.dataclass(kw_only=True)(cls)


@schema
class Options(Schema):
    """Base of the settings of an object of yours, which a config key names as `package.module:object`.

    A schema class that derives from it and annotates the parameter `options` of the object defines the keys of the
    section `options` next to that config key.
    """


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a schema class, including inherited fields."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = inspect.cleandoc(doc)
    return docs
