"""Experiment trackers that receive metrics in addition to metrics.jsonl.

A backend is a module of this package with a function `open_tracker`, chosen by its name in `tracker.backends`, or an
object of the user. Each works in a separate thread, so that one that fails or hangs does not stop the run.
"""

import contextlib
import dataclasses
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.plug_ins import call_plug_in, is_plug_in
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.config.serialize import stored_values
from maxhydra.record import RunDirectory
from maxhydra.record.redact import is_secret
from maxhydra.record.rollout_store import search
from maxhydra.record.rollouts import FOLDER, KINDS, Query

log = logging.getLogger("maxhydra")

# Seconds that a tracker may take to start and to send queued calls at the end, and the maximum number of queued calls.
OPEN_SECONDS, CLOSE_SECONDS, QUEUED_CALLS = 180.0, 60.0, 10_000
# Rollouts of each kind that are sent after an evaluation and at the end of a session.
NUM_ROLLOUTS = 50
# Rollouts by kind, newest last.
Rollouts = Mapping[str, Sequence[Mapping[str, Any]]]


class Tracker(Protocol):
    """Receives the metrics of a run when they are logged."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


@dataclasses.dataclass(frozen=True)
class TrackedOutcome:
    """How a session ended: status of the run, last step, the sample, and the newest rollouts."""

    status: str
    step: int
    sample: str | None
    rollouts: Rollouts


class Backend(Tracker, Protocol):
    """A tracker that is closed at the end.

    One that can show text and tables also has `log_rollouts(step, rollouts)`, called after evaluations, and
    `log_outcome(outcome)`.
    """

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class TrackedSession:
    """The session to track: steps up to `resumed_from` are valid, later ones of an earlier session are discarded."""

    run: RunDirectory
    config: Config
    resumed_from: int

    @property
    def config_dict(self) -> dict[str, Any]:
        """The values of config.yaml, without secrets."""
        return stored_values(self.config)

    def facts(self, backend: str) -> dict[str, Any]:
        """What earlier sessions of the run recorded about a backend in run.json."""
        return dict(self.run.read().get("trackers", {}).get(backend, {}))

    def record(self, backend: str, **facts: Any) -> None:
        """Record facts in run.json with which the next session of the run continues."""
        self.run.update(trackers={backend: facts})


def open_trackers(tracker: TrackerConfig, *, run: RunDirectory, config: Config, resumed_from: int) -> "Trackers":
    """All backends of `tracker.backends` as one tracker; a no-op without any and on processes that do not write."""
    session = TrackedSession(run, config, resumed_from)
    for name in ("project", "entity", "uri") if tracker.backends else ():
        if is_secret(name, getattr(tracker, name) or ""):
            reason, hint = "looks like a key, and would be shown", "use the login of the tracker, or its variables"
            raise ConfigError(Problem(f"tracker.{name}", reason, hint=hint))
    trackers = Trackers()
    try:
        for backend in tracker.backends if run.writes else ():
            trackers.add(backend, session)
    except BaseException:
        trackers.close()
        raise
    return trackers


def track_outcome(config: Config, run: RunDirectory, *, status: str, facts: Mapping[str, Any]) -> None:
    """Send the status, the sample and the newest rollouts of a session to its trackers, which were closed before."""
    if not (config.tracker.backends and run.writes):
        return
    outcome = TrackedOutcome(status, facts.get("end_step", 0), facts.get("sample"), _newest_rollouts(run))
    try:
        trackers = open_trackers(config.tracker, run=run, config=config, resumed_from=outcome.step)
    except ConfigError as error:
        log.warning("the end of the run was not tracked: %s", error)
        return
    trackers.log_outcome(outcome)
    trackers.close()


def _newest_rollouts(run: RunDirectory) -> Rollouts:
    pages = {kind: search(run.path / FOLDER, Query(kind=kind, limit=NUM_ROLLOUTS)).records for kind in KINDS}
    return {kind: records[::-1] for kind, records in pages.items() if records}


def missing_package(error: ImportError, backend: str, tracker: TrackerConfig) -> ConfigError:
    """The error of a backend whose package is not installed."""
    reason, hint = f"{backend} is not installed ({error})", f"pip install 'maxhydra[{backend}]'"
    return ConfigError(Problem("tracker.backends", reason, value=tracker.backends, hint=hint))


def _open(backend: str, session: TrackedSession) -> Backend:
    tracker = session.config.tracker
    if is_plug_in(backend):
        own: Backend = call_plug_in(backend, session, options=tracker.options, key="tracker.backends")
        return own
    opened: Backend = importlib.import_module(f"{__name__}.{backend}").open_tracker(tracker, session)
    return opened


class Trackers:
    """Several trackers as one. An error in one is logged once and affects neither the others nor the run."""

    def __init__(self) -> None:
        self._threads: list[_TrackerThread] = []

    def add(self, backend: str, session: TrackedSession) -> None:
        """Start a backend; raises ConfigError if it does not start."""
        self._threads.append(_TrackerThread(backend, session))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics; with those of an evaluation, also the newest rollouts."""
        is_evaluation = any(name.startswith("eval/") for name in metrics)
        for thread in self._threads:
            thread.send(lambda tracker: tracker.log(step, metrics))
            if is_evaluation:
                thread.send_rollouts(step)

    def log_outcome(self, outcome: TrackedOutcome) -> None:
        """Send the end of a session to the trackers that can show it."""
        for thread in self._threads:
            thread.send(lambda tracker: tracker.log_outcome(outcome) if hasattr(tracker, "log_outcome") else None)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


class _TrackerThread:
    """A tracker and the thread that opens it, calls it and closes it."""

    def __init__(self, backend: str, session: TrackedSession):
        self._backend, self._session = backend, session
        self._calls: queue.Queue[Callable[[Any], None] | None] = queue.Queue(QUEUED_CALLS)
        self._is_open, self._is_warned = threading.Event(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker-{backend}", daemon=True)
        self._thread.start()
        if not self._is_open.wait(OPEN_SECONDS):
            reason = f"{backend} did not start within {OPEN_SECONDS:g} seconds"
            raise ConfigError(Problem("tracker.backends", reason, hint="check its server, or leave it out"))
        if isinstance(self._error, ConfigError):
            raise self._error
        if self._error is not None:
            reason = f"{backend} did not start: {type(self._error).__name__}: {self._error}"
            raise ConfigError(Problem("tracker.backends", reason, value=session.config.tracker.backends))

    def send(self, call: Callable[[Any], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn("does not respond")

    def send_rollouts(self, step: int) -> None:
        """Send the newest rollouts, which the thread reads, to a tracker that can show them."""

        def send(tracker: Any) -> None:
            if hasattr(tracker, "log_rollouts") and (rollouts := _newest_rollouts(self._session.run)):
                tracker.log_rollouts(step, rollouts)

        self.send(send)

    def close(self) -> None:
        """Wait for queued calls, but not for a tracker that hangs."""
        end = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"did not end within {CLOSE_SECONDS:g} seconds")

    def _work(self) -> None:
        try:
            tracker = _open(self._backend, self._session)
        except BaseException as error:
            self._error = error
            return
        finally:
            self._is_open.set()
        while (call := self._calls.get()) is not None:
            self._try(call, tracker)
        self._try(lambda tracker: tracker.close(), tracker)

    def _try(self, call: Callable[[Any], None], tracker: Backend) -> None:
        try:
            call(tracker)
        except Exception as error:
            self._warn(f"rejected metrics: {error or repr(error)}")

    def _warn(self, message: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning("%s %s; metrics.jsonl has them all", self._backend, message)
