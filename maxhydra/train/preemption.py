"""Signals that end a run gracefully: SIGTERM, SIGUSR1 and Ctrl-C save and end it after the current step.

A second Ctrl-C ends it at once. Schedulers are configured to send SIGUSR1 some time before a time limit.
"""

import os
import signal
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils


class PreemptionSignal:
    """Context manager whose `requested(step)` says whether the run should end, consistently on all processes.

    With several processes, SIGTERM belongs to JAX's preemption service, which agrees on one step for all of them;
    SIGUSR1 is forwarded to it.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._is_single_process = jax.process_count() == 1
        single_process_signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        self._handled = single_process_signals if self._is_single_process else (signal.SIGUSR1,)
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "PreemptionSignal":
        self._previous = {number: signal.signal(number, self._handle) for number in self._handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def requested(self, step: int) -> str | None:
        """The name of the signal that was received, or None."""
        if self._is_single_process:
            is_requested = self._received is not None
        else:
            is_requested = multihost_utils.reached_preemption_sync_point(step)
        return signal.Signals(self._received or signal.SIGTERM).name if is_requested else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number
        if not self._is_single_process:
            os.kill(os.getpid(), signal.SIGTERM)
