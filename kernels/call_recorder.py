"""Which operations a program calls, and on what: noted while it is traced."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """An operation and its arguments by name, arrays as shapes."""

    operation: Callable[..., Any]
    arguments: Mapping[str, Any]


_notes: ContextVar[list[RecordedCall] | None] = ContextVar("notes", default=None)


def watched(operation: Callable[P, R]) -> Callable[P, R]:
    """The operation; calls while somebody watches are noted."""
    signature = inspect.signature(operation)

    @functools.wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        notes = _notes.get()
        if notes is not None:
            given = signature.bind(*args, **kwargs).arguments
            notes.append(RecordedCall(call, {name: _shape(value) for name, value in given.items()}))
        return operation(*args, **kwargs)

    return call


@contextmanager
def watching() -> Iterator[list[RecordedCall]]:
    """Calls that are traced inside, in order."""
    notes: list[RecordedCall] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _shape(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array) else value
