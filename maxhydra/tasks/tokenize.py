"""Tokenize a source once into ArrayRecord shards, in parallel; an interrupted run can be resumed.

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
from maxhydra.config.schema.tasks.preparation import TokenizeTask
from maxhydra.data.shards import COUNTERS_PER_SHARD, ShardIndex, ShardResult, Shards, open_index
from maxhydra.data.workers import WorkerDied, Workers
from maxhydra.record.processes import spawn_context
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = KEEPS_RUN = False

log = logging.getLogger("maxhydra")

# Seconds between two updates of the progress bar, and between two log lines without a terminal.
UPDATE_INTERVAL, LOG_INTERVAL = 0.25, 10.0


def run(job: Job) -> Outcome:
    data, task = job.config.data, job.config.task
    assert isinstance(task, TokenizeTask)
    folder = Path(task.output).expanduser().absolute()
    shards = Shards(data, folder, task.shards)
    with open_index(folder, data, shards, task.shards) as index:
        remaining = [shard for shard in range(task.shards) if shards.name(shard) not in index.done]
        if remaining:
            _write_all(remaining, index, shards, data=data, task=task)
        totals = index.totals
    skipped = f", {totals['skipped']:,} skipped" if totals["skipped"] else ""
    print(
        f"{totals['records']:,} records, {totals['tokens']:,} tokens{skipped} in {task.shards} shards, {folder}\n"
        f"train on them with: data=grain data.path={folder} data.record_type=tokens"
    )
    return Outcome("finished", "all shards written", {name: float(value) for name, value in totals.items()})


def _write_all(remaining: list[int], index: ShardIndex, shards: Shards, *, data: Data, task: TokenizeTask) -> None:
    """Write every remaining shard in a worker process, as many at a time as there are workers."""
    count = min(task.workers or os.cpu_count() or 1, len(remaining))
    counters: Any = spawn_context.RawArray("q", COUNTERS_PER_SHARD * task.shards)
    initializer = partial(_init_worker, data, Path(task.output).expanduser().absolute(), task.shards, counters)
    with Display(shards.records, index.totals) as display, Workers(count, initializer) as pool:
        pending = {pool.submit(_write_shard, shard) for shard in remaining}
        try:
            while pending:
                finished, pending = wait(pending, timeout=UPDATE_INTERVAL, return_when=FIRST_COMPLETED)
                for result in sorted((future.result() for future in finished), key=lambda result: result.shard):
                    for bad_record in result.bad_records:
                        log.warning("skipped %s: %s", bad_record.location, bad_record.reason)
                    index.add(shards.name(result.shard), result)
                display.show(sum(counters[0::COUNTERS_PER_SHARD]), sum(counters[1::COUNTERS_PER_SHARD]))
        except WorkerDied:
            reason = "a worker process died, possibly killed for lack of memory"
            hint = "run the same command with a lower task.workers to resume after the finished shards"
            raise ConfigError(Problem("task.workers", reason, value=count, hint=hint)) from None


class Display:
    """Progress on stderr (records, tokens per second): a bar on a terminal, log lines elsewhere."""

    def __init__(self, records: int | None, earlier_totals: dict[str, int]):
        console = Console(stderr=True)
        self._earlier_records = earlier_totals["records"] + earlier_totals["skipped"]
        self._records, self._start_time = records, time.monotonic()
        self._last_log_time = self._start_time
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("records  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._task = self._bar.add_task("", total=records, completed=self._earlier_records, speed="")

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, records: int, tokens: int) -> None:
        """Update the progress with the counts of this session."""
        now = time.monotonic()
        speed = f"{tokens / (now - self._start_time) / 1e6:.2f}M tok/s"
        done = self._earlier_records + records
        self._bar.update(self._task, completed=done, speed=speed)
        if self._bar.disable and now - self._last_log_time > LOG_INTERVAL:
            self._last_log_time = now
            total = f"/{self._records:,}" if self._records is not None else ""
            self._bar.console.print(f"{done:,}{total} records  {speed}", highlight=False)


# State of a worker process: how to open the shards, then the shards, and its shared counters.
_worker_state: dict[str, Any] = {}


def _init_worker(data: Data, folder: Path, count: int, counters: Any) -> None:
    """Store how to open the shards.

    The source is opened with the first shard, so that an error is raised where the shard is awaited.
    """
    _worker_state["open"], _worker_state["counters"] = partial(Shards, data, folder, count), counters


def _write_shard(shard: int) -> ShardResult:
    if "shards" not in _worker_state:
        _worker_state["shards"] = _worker_state["open"]()
    result: ShardResult = _worker_state["shards"].write(shard, _worker_state["counters"])
    return result
