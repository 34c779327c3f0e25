"""Which backend of an operation serves a call: the one asked for, or the fastest that can."""

import functools
import logging
from collections.abc import Iterable, Mapping

logger = logging.getLogger("maxhydra")


class UnsupportedError(Exception):
    """The backend that was asked for cannot serve the call."""

    def __init__(self, operation: str, backend: str, reasons: tuple[str, ...], able: tuple[str, ...]):
        self.operation, self.backend, self.reasons, self.able = operation, backend, reasons, able
        super().__init__(f"{operation} on {backend}: {'; '.join(reasons)} (able: {', '.join(able)})")


def either(names: Iterable[object]) -> str:
    """As a refusal tells what would be taken."""
    return " or ".join(map(str, names))


def chosen(operation: str, backend: str, refusals: Mapping[str, tuple[str, ...]]) -> str:
    """`refusals`: backend -> why it cannot serve the call, fastest first; `auto` takes the first that can."""
    able = tuple(name for name, reasons in refusals.items() if not reasons)
    if backend != "auto":
        if refusals[backend]:
            raise UnsupportedError(operation, backend, refusals[backend], able)
        return backend
    if not able:
        reasons = tuple(f"{name} {'; '.join(reasons)}" for name, reasons in refusals.items())
        raise UnsupportedError(operation, backend, reasons, able)
    faster = list(refusals.items())[: list(refusals).index(able[0])]
    _announce(operation, able[0], tuple(f"{name} {reasons[0]}" for name, reasons in faster))
    return able[0]


@functools.cache
def _announce(operation: str, backend: str, passed_over: tuple[str, ...]) -> None:
    """Say once what `auto` took, and the first reason against anything faster."""
    logger.info("%s runs on %s%s", operation, backend, f" ({'; '.join(passed_over)})" if passed_over else "")
