"""SIGTERM, SIGUSR1 and Ctrl-C ask the run to save and end after the step under way; a second Ctrl-C ends it at once.

SIGUSR1 is what schedulers are told to send some time before a limit.
"""

import os
import signal
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils


class PreemptionSignal:
    """While active, `requested(step)` says whether the run was asked to end, the same on every process.

    Among several processes SIGTERM belongs to JAX's preemption service, which agrees on one step for all; SIGUSR1 is
    handed on to it.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._alone = jax.process_count() == 1
        self._watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) if self._alone else (signal.SIGUSR1,)
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "PreemptionSignal":
        self._previous = {number: signal.signal(number, self._note) for number in self._watched}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def requested(self, step: int) -> str | None:
        """The name of the signal, or None."""
        asked = self._signal is not None if self._alone else multihost_utils.reached_preemption_sync_point(step)
        return signal.Signals(self._signal or signal.SIGTERM).name if asked else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
