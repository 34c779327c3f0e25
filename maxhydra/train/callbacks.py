"""Callbacks: objects of the user that observe a run, named in `train.callbacks`.

A callback is a class with any of the methods of `Callback`. It is created once per session, on the process that writes
the run folder, and receives copies of the logged metrics: it cannot change the state, the batches or the config, and
cannot end the run, so that a run with callbacks trains exactly as one without. An exception in a callback fails the
run. After a kill, the steps since the last checkpoint are trained and reported again.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from maxhydra.config import Config
from maxhydra.config.plug_ins import call_plug_in
from maxhydra.record import RunDirectory


@dataclasses.dataclass(frozen=True)
class CallbackSession:
    """The argument of a callback class: run folder, config, and the step that the session starts from."""

    folder: Path
    config: Config
    start: int


class Callback(Protocol):
    """All methods of a callback; a class may have any of them."""

    def begin(self) -> None:
        """Called before the first step of a session."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of every logged step (train.log_every), up to one logged step later."""
        ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of every evaluation."""
        ...

    def save(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete: at the next save, or at the end."""
        ...

    def end(self, status: str, step: int, metrics: Mapping[str, float]) -> None:
        """Called at the end of a session: finished, preempted or failed; not after an exception or a kill."""
        ...


class Callbacks:
    """The callbacks of a session, called in the order of the config."""

    def __init__(self, config: Config, run: RunDirectory, *, start: int):
        session = CallbackSession(run.path, config, start)
        self._checkpoints = run.checkpoints
        self._callbacks: dict[str, Any] = {}
        for name, entry in config.train.callbacks.items() if run.writes else ():
            assert entry.function is not None
            key = f"train.callbacks.{name}.function"
            self._callbacks[name] = call_plug_in(entry.function, session, options=entry.options, key=key)

    def begin(self) -> None:
        self._call("begin")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report logged metrics, as a tracker does; those of evaluations have names that start with eval/."""
        is_evaluation = any(name.startswith("eval/") for name in metrics)
        self._call("evaluation" if is_evaluation else "step", step, metrics)

    def save(self, step: int) -> None:
        self._call("save", step, self._checkpoints / str(step))

    def end(self, status: str, step: int, metrics: Mapping[str, float]) -> None:
        self._call("end", status, step, metrics)

    def _call(self, method: str, *arguments: Any) -> None:
        for name, callback in self._callbacks.items():
            copies = [dict(argument) if isinstance(argument, Mapping) else argument for argument in arguments]
            try:
                getattr(callback, method, _ignore)(*copies)
            except Exception as error:
                error.add_note(f"in train.callbacks.{name}, {type(callback).__qualname__}.{method}")
                raise


def _ignore(*arguments: Any) -> None:
    pass
