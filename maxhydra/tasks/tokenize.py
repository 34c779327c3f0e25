"""Tokenize a source once: ArrayRecord shards of tokens, in parallel, to be gone on with after any end.

The result is read with data=grain data.path=FOLDER data.record_type=tokens.
"""

import logging
import os
import time
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.tasks.tokenize import TokenizeTask
from maxhydra.data.shard_index import ShardIndex, open_index
from maxhydra.data.shards import COUNTED, Shards, Written
from maxhydra.data.workers import SPAWN, WorkerDied, Workers
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = KEEPS_RUN = False

log = logging.getLogger("maxhydra")

# Seconds between two looks at how far the workers are, and between two lines where no bar can be drawn.
LOOK, LINE = 0.25, 10.0


def run(job: Job) -> Outcome:
    data, task = job.config.data, job.config.task
    assert isinstance(task, TokenizeTask)
    folder = Path(task.output).expanduser().absolute()
    shards = Shards(data, folder, task.shards)
    with open_index(folder, data, shards, task.shards) as index:
        left = [shard for shard in range(task.shards) if shards.name(shard) not in index.done]
        if left:
            _write_all(left, index, shards, data=data, task=task)
        totals = index.totals
    skipped = f", {totals['skipped']:,} skipped" if totals["skipped"] else ""
    print(
        f"{totals['records']:,} records, {totals['tokens']:,} tokens{skipped} in {task.shards} shards, {folder}\n"
        f"train on them with: data=grain data.path={folder} data.record_type=tokens"
    )
    return Outcome("finished", "all shards written", {name: float(value) for name, value in totals.items()})


def _write_all(left: list[int], index: ShardIndex, shards: Shards, *, data: Data, task: TokenizeTask) -> None:
    """Every shard in a worker, as many at a time as there are workers."""
    count = min(task.workers or os.cpu_count() or 1, len(left))
    counted: Any = SPAWN.RawArray("q", COUNTED * task.shards)
    begin = partial(_begin, data, Path(task.output).expanduser().absolute(), task.shards, counted)
    with Display(shards.records, index.totals) as display, Workers(count, begin) as pool:
        pending = {pool.submit(_work, shard) for shard in left}
        try:
            while pending:
                finished, pending = wait(pending, timeout=LOOK, return_when=FIRST_COMPLETED)
                for written in sorted((future.result() for future in finished), key=lambda written: written.shard):
                    for fault in written.faults:
                        log.warning("skipped %s: %s", fault.place, fault.reason)
                    index.add(shards.name(written.shard), written)
                display.show(sum(counted[0::COUNTED]), sum(counted[1::COUNTED]))
        except WorkerDied:
            reason = "a worker process ended in the middle of its work, perhaps for want of memory"
            hint = "run the same command again to go on from the shards that are done, with task.workers lower"
            raise ConfigError(Problem("task.workers", reason, value=count, hint=hint)) from None


class Display:
    """A bar on a terminal, lines elsewhere: on stderr, records done and tokens a second."""

    def __init__(self, records: int | None, before: dict[str, int]):
        console = Console(stderr=True)
        self._before = before["records"] + before["skipped"]
        self._records, self._began = records, time.monotonic()
        self._line = self._began
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("records  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._task = self._bar.add_task("", total=records, completed=self._before, speed="")

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, records: int, tokens: int) -> None:
        """How far this session is."""
        now = time.monotonic()
        speed = f"{tokens / (now - self._began) / 1e6:.2f}M tok/s"
        done = self._before + records
        self._bar.update(self._task, completed=done, speed=speed)
        if self._bar.disable and now - self._line > LINE:
            self._line = now
            total = f"/{self._records:,}" if self._records is not None else ""
            self._bar.console.print(f"{done:,}{total} records  {speed}", highlight=False)


# What a worker process holds: how to open the shards, then the shards, and the numbers that it counts up.
_mine: dict[str, Any] = {}


def _begin(data: Data, folder: Path, count: int, counted: Any) -> None:
    """The source is opened with the first shard: what goes wrong there is raised where the shard is waited for."""
    _mine["open"], _mine["counted"] = partial(Shards, data, folder, count), counted


def _work(shard: int) -> Written:
    if "shards" not in _mine:
        _mine["shards"] = _mine["open"]()
    written: Written = _mine["shards"].write(shard, _mine["counted"])
    return written
