"""Detects training steps that hang, writes the Python stacks of all threads and processes, and then ends the run.

A thread looks once per second which dispatched steps the device has completed. It needs neither the main thread, which
may hang inside XLA, nor a call that waits for the device. A step counts as hung once it takes `factor` times the median
of recent steps, and twice the slowest of them: a rollout may precede every fourth step. Evaluations, saves and
compilations do not count. If even this thread cannot run, because native code holds the GIL, a timer of faulthandler,
which does not need the GIL, writes the stacks and ends the process.
"""

import contextlib
import faulthandler
import logging
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxhydra.config.schema.health import Watchdog as Settings
from maxhydra.runtime import alerts, peers, signals

log = logging.getLogger("maxhydra")
POLL_SECONDS = 1.0
RECENT = 50
# Observations before the median is used.
ENOUGH = 5
SLOWEST_FACTOR = 2
# Time without the GIL, after the run should have ended, until faulthandler ends the process.
GIL_SECONDS = 60.0
# Beginnings of names of functions of jax that are on the stack of a thread that traces, lowers or compiles a program.
COMPILING = ("compile_or_get_cached", "backend_compile_and_load", "lower_jaxpr_to_module", "trace_to_jaxpr")


class Watchdog:
    """Watches the steps of one session from `start` to `close`; without a factor, its methods do nothing."""

    def __init__(self, settings: Settings, folder: Path, *, process: int = 0):
        self._settings, self._process = settings, process
        self._is_on = settings.factor is not None
        self._path = folder / f"stacks-{process}.txt"
        self._pending: deque[tuple[int, Any]] = deque()
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._period = min(POLL_SECONDS, settings.min_seconds / 10)
        self._step, self._since, self._stacks_since, self._polled_at = 0, 0.0, 0.0, 0.0
        self._pauses = 0
        self._hung_since: float | None = None
        self._lock, self._is_closed = threading.Lock(), threading.Event()

    def start(self, step: int) -> None:
        """Watch from now on; `step` is the last completed step."""
        if not self._is_on:
            return
        self.reset(step)
        peers.attach_stacks(self.write_stacks)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def reset(self, step: int) -> None:
        """Count the time of the step after `step` from now."""
        self._step, self._since = step, time.monotonic()
        self._polled_at = self._since

    def count_step(self, step: int, result: Any) -> None:
        """Take an output of a step that was just dispatched: a jax.Array, of which `is_ready` is used."""
        if self._is_on:
            self._pending.append((step, result))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this context, at whose start the device has completed all steps."""
        self._pauses += 1
        try:
            yield
        finally:
            self._since = time.monotonic()
            self._pauses -= 1

    def close(self) -> None:
        self._is_closed.set()
        if self._is_on:
            faulthandler.cancel_dump_traceback_later()

    @property
    def bound(self) -> float:
        """Seconds after which the current step counts as hung."""
        if self._settings.factor is None or len(self._durations) < ENOUGH:
            return max(self._settings.min_seconds, self._settings.first_seconds)
        typical = self._settings.factor * statistics.median(self._durations)
        return max(self._settings.min_seconds, typical, SLOWEST_FACTOR * max(self._durations))

    def _watch(self) -> None:
        while not self._is_closed.wait(self._period):
            self.poll()
            if not self._is_closed.is_set():
                self._arm_faulthandler()

    def poll(self) -> None:
        """Look which steps the device has completed, and report the current one if it hangs."""
        now = time.monotonic()
        # A process that was stopped itself, such as by SIGSTOP, has no hung step.
        was_stopped = now - self._polled_at > self._period + self.bound / 2
        self._polled_at = now
        completed = self._collect(now)
        if self._pauses or was_stopped:
            self._since = now
        elif not completed and now - self._since > self.bound:
            self._report(now)

    def _collect(self, now: float) -> bool:
        """Count the steps that the device has completed since the last call; True if there are any."""
        count = 0
        while self._pending and self._pending[0][1].is_ready():
            self._step, _ = self._pending.popleft()
            count += 1
        if count:
            if self._hung_since is not None:
                log.warning("step %d completed after %.0f s", self._step, now - self._since)
            self._durations.append((now - self._since) / count)
            self._since, self._hung_since = now, None
        return count > 0

    def _report(self, now: float) -> None:
        if self._hung_since is None:
            if _is_compiling():
                self._since = now
                return
            self._hung_since = now
            self.write_stacks(self._reason(now))
            peers.request_stacks(self._reason(now))
            alerts.send("stall", self._reason(now), step=self._step + 1)
        elif self._settings.end_seconds is not None and now - self._hung_since > self._settings.end_seconds:
            peers.end_run(f"{self._reason(now)}; the Python stacks of all threads are in stacks-*.txt")

    def _reason(self, now: float) -> str:
        known = f" (median {statistics.median(self._durations):.3g} s)" if self._durations else ""
        process = f" in process {self._process}" if signals.is_distributed() else ""
        return f"step {self._step + 1} has not completed for {now - self._since:.3g} s{known}{process}"

    def write_stacks(self, reason: str) -> None:
        """Write the Python stacks of all threads to the file and the log, once for each hung step."""
        with self._lock:
            if self._stacks_since == self._since:
                return
            self._stacks_since = self._since
        stacks = format_stacks()
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n\n{stacks}\n")
        # The main thread may hang while it holds the lock of the log.
        message = f"{reason}; Python stacks of all threads:\n{stacks}"
        threading.Thread(target=log.warning, args=("%s", message), name="log-stacks", daemon=True).start()

    def _arm_faulthandler(self) -> None:
        """Let faulthandler write to stderr and exit if this thread does not run again."""
        if self._settings.end_seconds is not None:
            seconds = self.bound + self._settings.end_seconds + GIL_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def format_stacks() -> str:
    """The Python stacks of all threads of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    own = threading.get_ident()
    return "\n".join(
        f"Thread {names.get(ident, 'of native code')} ({ident:#x}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != own
    )


def _is_compiling() -> bool:
    """Whether any thread of this process traces or compiles a program."""
    stacks = (traceback.walk_stack(frame) for frame in sys._current_frames().values())
    return any(frame.f_code.co_name.startswith(COMPILING) for stack in stacks for frame, _ in stack)
