"""Callbacks (`train.callbacks`) with which a run interrupts itself at an exact moment.

A test that polls the files of a run and then sends a signal may be late on a busy machine.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxhydra import Options, schema
from maxhydra.train.callbacks import CallbackSession


@schema
class SignalOptions(Options):
    """Settings of `SignalItself`."""

    signal: str = "SIGTERM"
    """Name of the signal."""

    at: int = 0
    """First step whose metrics send it."""


class SignalItself:
    """Sends its process a signal once the metrics of a step or an evaluation are written."""

    def __init__(self, session: CallbackSession, options: SignalOptions):
        self._number, self._at = signal.Signals[options.signal], options.at

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self._at:
            os.kill(os.getpid(), self._number)
            self._at = 2**31

    evaluation = step


class KillInSave:
    """Kills its process when a checkpoint that is written completely is about to get its name."""

    def __init__(self, session: CallbackSession):
        checkpoints = session.folder / "checkpoints"

        def rename(source: Any, target: Any, *arguments: Any, original: Any = os.rename, **more: Any) -> None:
            if Path(target).parent == checkpoints:
                os.kill(os.getpid(), signal.SIGKILL)
            original(source, target, *arguments, **more)

        os.rename = os.replace = rename  # type: ignore[assignment]


class Held:
    """Blocks a run after its first step until the file `go` exists in its parent folder."""

    def __init__(self, session: CallbackSession):
        self._file = session.folder.parent / "go"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        while not self._file.exists():
            time.sleep(0.05)


def override(name: str, **options: Any) -> str:
    """The override that adds one of these callbacks to a run."""
    given = ", ".join(f"{key}: {value}" for key, value in options.items())
    return f"+train.callbacks={{own: {{function: '{__name__}:{name}', options: {{{given}}}}}}}"
