"""After which steps a run saves a checkpoint: by steps, by time, and as often as a limit of the overhead allows.

All processes must save the same steps, so process 0 makes every decision that depends on a clock, and sends the others
the number of steps until the next one.
"""

import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterator

from maxhydra.config.schema.checkpoint import Checkpoint, SaveMode
from maxhydra.runtime.channel import broadcast

# checkpoint.max_overhead: steps before the first save, whose durations decide about the next ones, and the expected
# time to the commit of a save, relative to that of the previous one.
FIRST_SAVE, COMMIT_MARGIN = 10, 1.25
# checkpoint.every_minutes: largest share of the time that saves may block training.
TIMED_OVERHEAD = 0.05


class Tier(enum.Enum):
    """Where a checkpoint is saved: in the run's folder, or on the disks of the hosts (checkpoint.local_every)."""

    run = enum.auto()
    local = enum.auto()


class TimedSaves:
    """Saves by time: checkpoint.first_minutes after the first step of the session, then every checkpoint.every_minutes.

    A save is delayed while saves have blocked training for more than TIMED_OVERHEAD of the time. The time of the next
    save is converted to steps, and estimated again after twice as many steps at the latest.
    """

    def __init__(self, config: Checkpoint, clock: Callable[[], float]):
        self._config, self._clock = config, clock
        self._first: tuple[int, float] | None = None
        """Step and time of the first call: the time before it is mostly compilation."""
        self._last_save: float | None = None
        self._blocked = 0.0
        self._next = 0

    def is_due(self, step: int) -> bool:
        """Whether to save after this step. To be called after each step."""
        if self._config.every_minutes is None or self._config.mode is SaveMode.off:
            return False
        if self._first is None:
            self._first, self._next = (step, self._clock()), step + 1
            return False
        if step < self._next:
            return False
        steps = broadcast(self._steps_until_due(step, *self._first))
        self._next = step + max(1, steps)
        return steps == 0

    def count_save(self, seconds: float) -> None:
        """Count a save, for whatever reason it was due, that blocked training for some time."""
        self._last_save = self._clock()
        self._blocked += seconds

    def _steps_until_due(self, step: int, first: int, began: float) -> int:
        """Steps until the next decision; 0: a save is due."""
        assert self._config.every_minutes is not None
        now = self._clock()
        due = began + 60 * min(self._config.first_minutes, self._config.every_minutes)
        if self._last_save is not None:
            due = max(self._last_save + 60 * self._config.every_minutes, began + self._blocked / TIMED_OVERHEAD)
        seconds_per_step = max(1e-6, (now - began) / (step - first))
        # A step that ends nearer to the time than the next one is the one to save.
        steps = round((due - now) / seconds_per_step)
        return max(0, min(steps, step - first))


class SaveSchedule:
    """After which steps to save, and where.

    With checkpoint.max_overhead, a save follows as soon as the previous one is expected to be committed, unless saves
    would block training for more than this share of the time. Process 0 decides at every save when the next one is due,
    from the durations so far.
    """

    def __init__(
        self, config: Checkpoint, *, is_saving: Callable[[], bool], clock: Callable[[], float] = time.perf_counter
    ):
        self._config, self._is_saving, self._clock = config, is_saving, clock
        self._first: tuple[int, float] | None = None
        """Step and time of the first call: the time before it is mostly compilation."""
        self._next: int | None = None
        self._save_started: float | None = None
        self._blocked = self._commit = 0.0
        self._timed = TimedSaves(config, clock)

    def due_tier(self, step: int) -> Tier | None:
        """Where to save after this step; None: nowhere. To be called after each step."""
        config = self._config
        is_early = config.max_overhead is not None and self._observe(step)
        is_timed = self._timed.is_due(step)
        if step % config.every == 0 or is_timed or (is_early and config.local_every is None):
            return Tier.run
        is_local = config.local_every is not None and (is_early or step % config.local_every == 0)
        return Tier.local if is_local else None

    def _observe(self, step: int) -> bool:
        """Whether a save between the multiples of `every` is due."""
        now = self._clock()
        if self._first is None:
            self._first, self._next = (step, now), step + FIRST_SAVE
        if self._save_started is not None and not self._is_saving():
            self._commit, self._save_started = now - self._save_started, None
        return self._next is not None and step >= self._next

    @contextlib.contextmanager
    def measure(self, step: int, tier: Tier) -> Iterator[None]:
        """Measure the time that a save blocks the loop, and decide when the next one is due."""
        started = self._clock()
        yield
        if tier is Tier.run:
            self._timed.count_save(self._clock() - started)
        if self._config.max_overhead is None:
            return
        if self._save_started is not None:
            self._commit = started - self._save_started  # at least: the loop has waited for it
        self._blocked += (last := self._clock() - started)
        self._save_started = started
        self._next = step + broadcast(self._interval(step, last, self._config.max_overhead))

    def _interval(self, step: int, last: float, max_overhead: float) -> int:
        """Steps until the next save, if it takes as long as the last one."""
        assert self._first is not None
        first, began = self._first
        elapsed = self._clock() - began
        step_seconds = max(1e-6, (elapsed - self._blocked) / max(1, step - first))
        until_committed = COMMIT_MARGIN * self._commit
        until_affordable = (self._blocked + last) / max_overhead - elapsed
        return max(1, math.ceil(max(until_committed, until_affordable) / step_seconds))
