"""Backend selection: capability tables, and the `Operation` that picks a backend for a call.

An operation lists its backends fastest first. `auto` selects the first one that supports the call. A backend that is
requested by name and cannot serve the call raises `UnsupportedError`; nothing falls back silently.

`recording` records which operations a program calls, and with which shapes, while it is traced; `recording_choices`
records the backends that serve them. `unlogged_choices` disables the log lines about them.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from maxhydra.kernels.placement import Placement
from maxhydra.kernels.tiles import Sizes, tile_size_problems

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


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend that serves a call of an operation."""

    operation: str
    backend: str
    skipped: tuple[str, ...]
    """The faster backends, each with the first reason against it; empty if the backend was requested by name."""


_choices: ContextVar[list[Choice] | None] = ContextVar("choices", default=None)


@contextmanager
def recording_choices() -> Iterator[list[Choice]]:
    """Collect the backends that are selected in the context, each combination once, in order."""
    choices: list[Choice] = []
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


_logs_choices: ContextVar[bool] = ContextVar("logs_choices", default=True)


@contextmanager
def unlogged_choices() -> Iterator[None]:
    """Do not log the backends that are selected in the context: for traces of programs that will not run."""
    token = _logs_choices.set(False)
    try:
        yield
    finally:
        _logs_choices.reset(token)


def _record_choice(choice: Choice) -> str:
    """Add the choice to those of `recording_choices`, and return its backend."""
    choices = _choices.get()
    if choices is not None and choice not in choices:
        choices.append(choice)
    return choice.backend


def _abstract(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array) else value


logger = logging.getLogger("maxhydra")

# Fields of a capability table that are functions, not capabilities.
FUNCTION_FIELDS = ("run", "run_pair", "block", "tile_extents", "prefill_write", "split_vocabulary")


class UnsupportedError(Exception):
    """The requested backend cannot serve the call, or under `auto` no backend can."""

    def __init__(self, operation: str, backend: str, reasons: tuple[str, ...], supported: tuple[str, ...]):
        self.operation, self.backend, self.reasons, self.supported = operation, backend, reasons, supported
        alternatives = ", ".join(supported) or "none"
        super().__init__(f"{operation} on {backend}: {'; '.join(reasons)} (supported backends: {alternatives})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSpec:
    """The static properties of a call that decide which backends can serve it."""

    platform: str
    dtype: str
    splits: tuple[str, ...] = ()
    """Dimensions of the operands that are split over devices (Placement.splits)."""
    capability: str | None = None
    """Compute capability of an NVIDIA GPU."""
    sizes: Sizes = ()
    """Requested tile sizes."""


Call = TypeVar("Call", bound=CallSpec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability(Generic[Call]):
    """The calls that a backend supports: one entry of a capability table. Operations add their own fields."""

    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    capabilities: tuple[str, ...] | None = None
    """Compute capabilities of the GPUs; None: any."""
    splits: tuple[str, ...] | None = None
    """Dimensions that may be split over devices: the backend then runs under shard_map on the local part of each.
    None: any; the compiler partitions it."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    slow_on: tuple[str, ...] = ()
    """Platforms on which the fastest backend takes less than half the time; `auto` warns if it selects this one."""
    tile_extents: Callable[[Call], Mapping[str, int]] | None = None
    """The array extent that each tile size must divide, by name; None: the backend has no configurable tile."""

    def unsupported_reasons(self, call: Call) -> tuple[str, ...]:
        """Why this backend cannot serve the call; empty if it can."""
        unsplittable = () if self.splits is None else tuple(name for name in call.splits if name not in self.splits)
        requirements = (
            (call.platform in self.platforms, f"runs on {either(self.platforms)}, not {call.platform}"),
            (
                self.capabilities is None or call.capability in self.capabilities,
                f"needs a GPU of compute capability {either(self.capabilities or ())}, "
                f"not {call.capability or call.platform}",
            ),
            (not unsplittable, f"cannot be split over {' and '.join(unsplittable)}"),
            (call.dtype in self.dtypes, f"takes {either(self.dtypes)}, not {call.dtype}"),
            *self.requirements(call),
        )
        problems = tile_size_problems(call, self.tile_extents)
        return (*(reason for is_met, reason in requirements if not is_met), *problems)

    def map_shards(
        self, run: Callable[..., R], place: Placement, *, in_specs: tuple[Any, ...], out_specs: Any
    ) -> Callable[..., R]:
        """The function on the shards of every device (Placement.shard_map); itself if the compiler partitions it."""
        return run if self.splits is None else place.shard_map(run, in_specs, out_specs)

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        """Further requirements as (is met, reason if it is not)."""
        return ()


Row = TypeVar("Row", bound=Capability[Any])


class Operation(Generic[Call, Row]):
    """An operation with several backends: selects one for each call, logs and records calls, prints its table.

    `backends`: name -> capabilities, fastest first. `order`: the names fastest first for a given call, for operations
    whose fastest backend depends on it; the default is the order of the table.
    """

    def __init__(self, name: str, backends: dict[str, Row], *, order: Callable[[Call], Iterable[str]] | None = None):
        self.name, self.backends, self._order = name, backends, order

    def choose(self, backend: str, call: Call) -> str:
        """Return the name of the backend that serves the call, or raise UnsupportedError."""
        order = self.backends if self._order is None else self._order(call)
        reasons = {name: self.backends[name].unsupported_reasons(call) for name in order}
        supported = tuple(name for name in reasons if not reasons[name])
        if backend != "auto":
            if reasons[backend]:
                raise UnsupportedError(self.name, backend, reasons[backend], supported)
            return _record_choice(Choice(self.name, backend, ()))
        if not supported:
            all_reasons = tuple(f"{name} {'; '.join(reasons[name])}" for name in reasons)
            raise UnsupportedError(self.name, backend, all_reasons, supported)
        faster = list(reasons)[: list(reasons).index(supported[0])]
        skipped = tuple(f"{name} {reasons[name][0]}" for name in faster)
        if _logs_choices.get():
            is_slow = call.platform in self.backends[supported[0]].slow_on
            _log_choice(self.name, supported[0], skipped, logging.WARNING if is_slow else logging.INFO)
        return _record_choice(Choice(self.name, supported[0], skipped))

    def select(self, backend: str, call: Call) -> Row:
        """Return the capabilities, with the function to run, of the backend that serves the call."""
        return self.backends[self.choose(backend, call)]

    def find(self, call: Call) -> str | None:
        """Return the name of the fastest backend that serves the call, or None."""
        return next((name for name, row in self.backends.items() if not row.unsupported_reasons(call)), None)

    def record_calls(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the operation's entry point so that `recording` collects its calls."""
        return recorded(function)

    def table(self) -> str:
        """The capability table in Markdown: a column for each backend, fastest first, a row for each capability."""
        backends = self.backends
        rows = [("", *(f"`{name}`" for name in backends)), ("---",) * (len(backends) + 1)]
        for field in dataclasses.fields(next(iter(backends.values()))):
            if field.name not in FUNCTION_FIELDS:
                values = (_cell(getattr(row, field.name)) for row in backends.values())
                rows.append((field.name.replace("_", " "), *values))
        rows = [row for row in rows if set(row[1:]) != {"any"} and (row[0] != "slow on" or set(row[1:]) != {"none"})]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def either(names: Iterable[object]) -> str:
    """Join the accepted values for an error message."""
    return " or ".join(map(str, names))


@functools.cache
def _log_choice(operation: str, backend: str, skipped: tuple[str, ...], level: int) -> None:
    """Log once which backend `auto` selected, and the first reason against each faster one."""
    slow = ", more than twice as slow as the fastest" if level == logging.WARNING else ""
    logger.log(level, "%s runs on %s%s%s", operation, backend, slow, f" ({'; '.join(skipped)})" if skipped else "")


def _cell(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
