"""SIGTERM and Ctrl-C ask the run to save and end after the step under way; a second Ctrl-C ends it at once."""

import signal
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils


class Interrupt:
    """While active, `requested(step)` says whether the run was asked to end, the same on every process.

    Among several processes SIGTERM belongs to JAX's preemption service, which agrees on one step for all.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._alone = jax.process_count() == 1
        self._watched = (signal.SIGTERM, signal.SIGINT) if self._alone else ()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._note) for number in self._watched}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def requested(self, step: int) -> str | None:
        """The name of the signal, or None."""
        if self._alone:
            return None if self._signal is None else signal.Signals(self._signal).name
        return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
