"""Where metrics go besides metrics.jsonl. A backend is a module here with a function `open_tracker`."""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from maxhydra.config import Config
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import plain

log = logging.getLogger("maxhydra")


class Tracker(Protocol):
    """Takes the metrics of a run as they come."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class TrackedSession:
    """What a backend is told: steps up to `resumed_from` are done, later ones of an earlier session are void."""

    run: RunDirectory
    config: Config
    resumed_from: int

    @property
    def config_dict(self) -> dict[str, Any]:
        return plain(dataclasses.asdict(self.config))


def open_trackers(tracker: TrackerConfig, *, run: RunDirectory, config: Config, resumed_from: int) -> Tracker:
    """All backends of `tracker.backends` as one; with none, and on processes that do not write, it does nothing."""
    session = TrackedSession(run, config, resumed_from)
    opened = _Trackers()
    try:
        for backend in tracker.backends if run.writes else ():
            module = importlib.import_module(f"maxhydra.train.trackers.{backend}")
            opened.add(backend, module.open_tracker(tracker, session))
    except BaseException:
        opened.close()
        raise
    return opened


class _Trackers:
    """Several trackers as one. What goes wrong in one is said once, and neither the others nor the run suffer."""

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
                log.warning("%s does not take metrics: %s; metrics.jsonl has them all", name, error or repr(error))
