"""Profiles of training steps or engine iterations: XPlane traces of jax.profiler, readable by XProf and Perfetto.

A profile starts at the steps of `profile.steps` and `profile.every`, and at the next step after SIGUSR2. The device
completes all earlier steps first, so that a profile contains whole steps; neither that nor writing the files counts as
step time. A failed profile is logged and does not end the run.
"""

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from maxhydra.config.schema.health import Profile
from maxhydra.record.facts import OPERATIONS, PROFILES, STEP_EVENT
from maxhydra.runtime import signals

log = logging.getLogger("maxhydra")
MEMORY = "memory.prof"
# `%fusion.1 = f32[8]{0} fusion(...), ..., metadata={op_name="jit(step)/mlp/dot_general" ...}`
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{op_name="([^"]+)"', re.MULTILINE)


class Profiler:
    """Profiles the steps of one session. `program` returns the compiled step as HLO text, or None."""

    def __init__(
        self,
        settings: Profile,
        folder: Path,
        *,
        process: int = 0,
        program: Callable[[], str | None] = lambda: None,
    ):
        self._settings, self._folder, self._program = settings, folder, program
        self._process = process
        self._last: int | None = None
        self._target = Path()
        self._is_requested = False

    @property
    def folder(self) -> Path:
        """The folder that contains a folder for each profile."""
        return self._folder / PROFILES

    def request(self) -> None:
        """Start a profile with the next step, as SIGUSR2 does; from any thread."""
        self._is_requested = True

    @contextlib.contextmanager
    def profile_iteration(self, step: int, wait: Callable[[], None]) -> Iterator[None]:
        """Run a step inside, profiled if that is due; `wait` waits until the device has completed it."""
        if self.is_due(step):
            self.start(step)
        with self.annotate(step):
            yield
        if self.is_complete(step):
            wait()
            self.stop()

    def is_due(self, step: int) -> bool:
        """Whether a profile starts before this step."""
        if self._last is not None:
            return False
        settings = self._settings
        # A signal asks the process that receives it, whichever that is.
        is_requested = signals.take_profile_request() or self._is_requested
        self._is_requested = False
        if self._process not in settings.processes:
            return is_requested
        is_periodic = settings.every is not None and step % settings.every == 0
        return is_requested or is_periodic or step in settings.steps[:1]

    def start(self, step: int) -> None:
        """Start a profile with this step; the device has completed all earlier ones."""
        is_range = step in self._settings.steps[:1]
        self._last = self._settings.steps[1] if is_range else step + self._settings.length - 1
        name = f"step_{step:05d}" + (f"-process_{self._process}" if self._process else "")
        self._target = self.folder / name
        options = jax.profiler.ProfileOptions()
        # Calls of Python functions would be most events of the trace, and slow down the host.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self._target, profiler_options=options)
        except (RuntimeError, OSError) as error:
            log.error("no profile of step %d: %s", step, error)
            self._last = None

    @contextlib.contextmanager
    def annotate(self, step: int) -> Iterator[None]:
        """Mark the dispatch of a step in a trace."""
        if self._last is None:
            yield
        else:
            with jax.profiler.StepTraceAnnotation(STEP_EVENT, step_num=step):
                yield

    def is_complete(self, step: int) -> bool:
        """Whether this step is the last of the current profile."""
        return self._last is not None and step >= self._last

    def stop(self) -> None:
        """Write the profile; the device has completed its last step."""
        self._last = None
        try:
            jax.profiler.stop_trace()
            if (text := self._program()) is not None:
                names = dict(_INSTRUCTION.findall(text))
                (self._target / OPERATIONS).write_text(json.dumps(names), encoding="utf-8")
            if self._settings.memory:
                jax.profiler.save_device_memory_profile(str(self._target / MEMORY))
        except (RuntimeError, OSError) as error:
            log.error("%s is incomplete: %s", self._target, error)
        else:
            log.info("profile: %s; maxhydra runs profile shows a summary", self._target)

    def close(self) -> None:
        """Write a profile that the end of the session cuts short."""
        if self._last is not None:
            self.stop()
