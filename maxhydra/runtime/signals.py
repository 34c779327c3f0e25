"""Signals that end a process gracefully: SIGTERM, SIGUSR1, SIGHUP and, for tasks that keep a run, Ctrl-C.

What a signal does depends on what would be lost:

- By default it raises `Interrupted` in the main thread. If the process has not ended GRACE_SECONDS later, because the
  main thread compiles or waits for a thread that does, a watcher thread records the run as preempted and exits.
- Inside `deferral`, which training enters with its first step, it is only noted: the loop asks `requested` after each
  step, and `check` and `wait` raise `Interrupted` in work that can be repeated (evaluations, rollouts).
- The second signal of a kind ends the process at once.
- With several processes, all of them end after the same step, whichever received the signal (peers.py).
- SIGUSR2 ends nothing: it asks for a profile of the next training steps (profiler.py).

Signals belong to the process, so this module has one state. Without `installed`, all functions do nothing.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from types import FrameType
from typing import TypeVar

from maxhydra.runtime import peers

T = TypeVar("T")

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
PROFILE = signal.SIGUSR2
GRACE_SECONDS = 4.0
# A closing terminal sends SIGHUP twice within milliseconds, from the kernel and from the shell: one request.
REPEAT_SECONDS = 0.2
POLL_SECONDS = 0.2


class Interrupted(BaseException):
    """A signal asks the process to end. Like KeyboardInterrupt, it is not an Exception that code could handle."""


class _Signals:
    """State of the process: the signals received, whether they are deferred, and when the process must have ended."""

    def __init__(self) -> None:
        self.phase = ""
        self.record: Callable[[str], None] | None = None
        self.is_distributed = self.is_deferred = self.is_dismissed = self.has_raised = False
        self.is_profile_requested = False
        self._number: int | None = None
        self._times: dict[int, float] = {}
        self._deadline: float | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._wakeup, self._bytes = socket.socketpair()
        self._is_closed = False

    def install(self) -> None:
        for number in HANDLED:
            self.take(number)
        self._previous[PROFILE] = signal.signal(PROFILE, self._request_profile)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def take(self, number: int) -> None:
        """Handle a signal, except a SIGHUP that the process was started to ignore (nohup)."""
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            return
        self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Restore the previous handlers; a process that is to end keeps its watcher, since its exit may hang."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._deadline is None:
            self._is_closed = True
            self._wakeup.send(b"\0")

    @property
    def reason(self) -> str:
        return f"{signal.Signals(self._number or signal.SIGTERM).name} {self.phase}".rstrip()

    @property
    def received(self) -> str | None:
        return None if self._number is None else signal.Signals(self._number).name

    def requested(self) -> str | None:
        """The name of the signal received, consistently on all processes, which make this call equally often."""
        number = peers.reached_stop() if self.is_distributed else self._number
        if number is None:
            return None
        # All end with, and the first one records, the signal that any of them got.
        self._number = number
        return signal.Signals(number).name

    def set_deferred(self, is_deferred: bool) -> None:
        self.is_deferred = is_deferred
        if is_deferred:
            self._deadline = None
        elif self._number is not None and not self.is_dismissed:
            self._deadline = time.monotonic() + GRACE_SECONDS
            self._wakeup.send(b"\0")

    def dismiss(self) -> None:
        self.is_dismissed, self._deadline = True, None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run in the main thread, as soon as it executes Python code."""
        self._number = self._number or number
        if not (self.is_distributed or self.is_deferred or self.is_dismissed or self.has_raised):
            self.has_raised = True
            raise Interrupted(self.reason)

    def _request_profile(self, number: int, frame: FrameType | None) -> None:
        self.is_profile_requested = True

    def _watch(self) -> None:
        """Run in the watcher thread, which receives signals even if the main thread does not execute Python code."""
        while not self._is_closed:
            deadline = self._deadline
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if select.select([self._bytes], [], [], timeout)[0]:
                for number in self._bytes.recv(64):
                    # Another handler, such as that of a server, may have replaced this one.
                    if number in self._previous and signal.getsignal(number) == self._handle:
                        self._note(number)
            elif (deadline := self._deadline) is not None and time.monotonic() >= deadline:
                self._exit()

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if now - self._times.setdefault(number, now) > REPEAT_SECONDS:
            self._exit()
        self._number = self._number or number
        if self.is_distributed:
            peers.request_stop(number)
        elif not (self.is_deferred or self.is_dismissed) and self._deadline is None:
            self._deadline = now + GRACE_SECONDS

    def _exit(self) -> None:
        """End the process from the watcher thread, without waiting for the main thread."""
        with contextlib.suppress(Exception):
            if self.record is not None:
                self.record(self.reason)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        os._exit(128 + (self._number or signal.SIGTERM))


_active: _Signals | None = None
_last: _Signals | None = None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Handle signals inside."""
    global _active, _last
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _active = _Signals()
    _active.install()
    try:
        yield
    finally:
        _active.uninstall()
        _active, _last = None, _active


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process if a signal interrupts the block, without Python's exit handlers.

    That of a half-connected jax.distributed waits for the other processes and then aborts: the exit code is lost.
    """
    try:
        yield
    except Interrupted as error:
        print_interruption(error)
        sys.stdout.flush()
        os._exit(exit_code(str(error)))


def print_interruption(error: Interrupted) -> None:
    """Print what interrupted the process, and how to resume."""
    print(f"maxhydra: {error}; run the same command again to resume", file=sys.stderr, flush=True)


def attach_run(record: Callable[[str], None], *, processes: int) -> None:
    """Record a forced exit with `record(reason)`, which must not overwrite an outcome that is recorded already."""
    if _active is not None:
        _active.record, _active.is_distributed = record, processes > 1
        if processes == 1:
            _active.take(signal.SIGINT)


def dismiss() -> None:
    """Ignore signals from now on, except a second one: the outcome is recorded, and only the report remains."""
    if _active is not None:
        _active.dismiss()


def has_interrupted() -> bool:
    """Whether `Interrupted` was raised in the main thread; errors that follow are its consequences."""
    return _active is not None and _active.has_raised


def last_request() -> str | None:
    """The signal that arrived in the last `installed` block, too late to interrupt it; None if there was none."""
    return None if _last is None else _last.received


def exit_code(reason: str) -> int:
    """The exit code for a reason: 128 plus the signal's number, as a shell reports a process that a signal killed."""
    return 128 + signal.Signals[reason.split()[0]]


def reason() -> str:
    """What ended the process: the name of the signal and what it interrupted."""
    return "" if _active is None else _active.reason


def requested() -> str | None:
    """The name of the signal that asks the run to end, or None; a collective call with several processes."""
    return None if _active is None else _active.requested()


def received() -> str | None:
    """The name of the signal that this process itself has received, or None; unlike `requested`, not a collective."""
    return None if _active is None else _active.received


def take_profile_request() -> bool:
    """Whether SIGUSR2 has arrived since the last call."""
    if _active is None or not _active.is_profile_requested:
        return False
    _active.is_profile_requested = False
    return True


def check() -> None:
    """Raise `Interrupted` if a signal asks the run to end; a collective call with several processes."""
    if _active is not None and _active.requested() is not None:
        raise Interrupted(_active.reason)


def wait(future: Future[T]) -> T:
    """The result of work in another thread, which is abandoned with `Interrupted` if a signal arrives."""
    if _active is None or _active.is_distributed:
        return future.result()
    while not wait_for_futures([future], timeout=POLL_SECONDS).done:
        check()
    return future.result()


def is_distributed() -> bool:
    """Whether several processes form the run, so that `requested` and `check` are collective calls."""
    return _active is not None and _active.is_distributed


def set_phase(text: str) -> None:
    """Describe what a signal would interrupt, for the reason that is recorded: `SIGTERM during the final sample`."""
    if _active is not None:
        _active.phase = text


class Deferral:
    """Defers signals from `start` to `end` or the end of its block, in which the caller saves what would be lost."""

    def __enter__(self) -> "Deferral":
        return self

    def start(self) -> None:
        if _active is not None:
            _active.set_deferred(True)

    def end(self) -> None:
        if _active is not None and _active.is_deferred:
            _active.set_deferred(False)

    def __exit__(self, *error: object) -> None:
        self.end()
