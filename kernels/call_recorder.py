"""Records which operations a program calls, and with which shapes, while it is traced."""

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
    """An operation and its arguments by name, with arrays as ShapeDtypeStruct."""

    operation: Callable[..., Any]
    arguments: Mapping[str, Any]


_calls: ContextVar[list[RecordedCall] | None] = ContextVar("calls", default=None)


def recorded(operation: Callable[P, R]) -> Callable[P, R]:
    """Wrap the operation so that its calls are recorded inside `recording`."""
    signature = inspect.signature(operation)

    @functools.wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        calls = _calls.get()
        if calls is not None:
            arguments = signature.bind(*args, **kwargs).arguments
            calls.append(RecordedCall(call, {name: _abstract(value) for name, value in arguments.items()}))
        return operation(*args, **kwargs)

    return call


@contextmanager
def recording() -> Iterator[list[RecordedCall]]:
    """Collect the calls that are traced in the context, in order."""
    calls: list[RecordedCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def _abstract(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array) else value
