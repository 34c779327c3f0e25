"""Experiment trackers that receive metrics in addition to metrics.jsonl.

A backend is a module of this package with a function `open_tracker`, chosen by its name in `tracker.backends`.
"""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.config.serialize import stored_values
from maxhydra.record import RunDirectory
from maxhydra.record.redact import is_secret

log = logging.getLogger("maxhydra")


class Tracker(Protocol):
    """Receives the metrics of a run when they are logged."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

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


def open_trackers(tracker: TrackerConfig, *, run: RunDirectory, config: Config, resumed_from: int) -> Tracker:
    """All backends of `tracker.backends` as one tracker; a no-op without any and on processes that do not write."""
    session = TrackedSession(run, config, resumed_from)
    for name in ("project", "entity") if tracker.backends else ():
        if is_secret(name, getattr(tracker, name) or ""):
            reason, hint = "looks like a key, and would be shown", "log in with `wandb login`, or WANDB_API_KEY"
            raise ConfigError(Problem(f"tracker.{name}", reason, hint=hint))
    trackers = _Trackers()
    try:
        for backend in tracker.backends if run.writes else ():
            module = importlib.import_module(f"maxhydra.train.trackers.{backend}")
            trackers.add(backend, module.open_tracker(tracker, session))
    except BaseException:
        trackers.close()
        raise
    return trackers


class _Trackers:
    """Several trackers as one. An error in one is logged once and affects neither the others nor the run."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._failed: set[str] = set()

    def add(self, name: str, tracker: Tracker) -> None:
        self._trackers[name] = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in self._trackers.items():
            self._try(name, functools.partial(tracker.log, step, metrics))

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            self._try(name, tracker.close)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                log.warning("%s rejected metrics: %s; metrics.jsonl has them all", name, error or repr(error))
