"""Kill, stop or terminate processes of a two-process run in each phase, and check how all of them end and resume.

    python scripts/death_matrix.py --report death.json            all 45 cells
    python scripts/death_matrix.py --signal KILL --victim 1 --moment save eval
    python scripts/death_matrix.py --task grpo --signal KILL
    python scripts/death_matrix.py --signal KILL --victim 1 --moment save --resume-processes 4
    python scripts/death_matrix.py --signal KILL --override checkpoint.local_every=3 checkpoint.peer_copies=1

A cell is a signal (KILL, STOP, TERM), its victim (process 0, process 1, all) and a moment (init, compile, step, save,
eval). The moment is recognized by an output of the run: a line of its console, a row of metrics.jsonl, or the temporary
folder of a checkpoint. A stopped process is continued once the others have ended, or, if all are stopped, after
STOP_SECONDS. The same command is then repeated until all processes exit with 0. A cell passes if the results are those
of an undisturbed run: every array of the last checkpoint, losses, evaluations, status and data position. With another
number of processes after the restart (--resume-processes, train.elastic), sums have another order, and the losses must
agree to 1e-6. A cell also fails if a process ends by another signal. Exit code 1 if a cell fails.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from kill_runs import ROOT, Process, compare, environment, last_values, read_run, split

SIGNALS, VICTIMS, MOMENTS = ("KILL", "STOP", "TERM"), ("0", "1", "all"), ("init", "compile", "step", "save", "eval")
TIMEOUT_SECONDS = 600
# Longer than hardware.distributed.silence_seconds of the run.
STOP_SECONDS = 20
MAX_STARTS = 3
# Steps of the run at which the moments are: a step between saves, a save after an earlier one, an evaluation.
STEP, SAVE, EVAL = 5, 8, 6
RUN = split(
    "train.steps=12 train.log_every=1 train.eval_every=6 train.eval_batches=20 train.sample.tokens=0 "
    "optimizer.schedule.warmup_steps=1 checkpoint.every=4 run.name=it "
    "hardware.distributed.silence_seconds=15 hardware.distributed.timeout_seconds=30"
)
TASKS = {
    "pretrain": ["model=micro", "train.seq_len=32", "train.per_device_batch_size=4", "data=demo", *RUN],
    "grpo": [
        *("task=grpo", "model=micro", "data=arithmetic", "data.record_type=prompts", *RUN),
        # Random weights produce letters in about half of the completions.
        *("reward=format", "reward.terms.format.pattern='.*[a-zA-Z].*'"),
        *("train.seq_len=12", "train.per_device_batch_size=8", "train.eval_batches=1"),
        *("task.group_size=4", "task.max_tokens=4", "task.engine.max_batch=16", "task.engine.cache_tokens=1024"),
    ],
}
# Exit codes with a reason: an error, a wrong config or no connection, a lost process, and SIGTERM.
EXIT_CODES = (1, 2, 75, 143)
# Relative difference of losses that a different order of summation makes.
TOLERANCE = 1e-6


class Launch(Protocol):
    """Starts a command in several processes that form a cluster, each with its console in the file console.INDEX."""

    def __call__(
        self, processes: int, arguments: Sequence[str], folder: Path, *, is_cold: bool
    ) -> Sequence[Process]: ...


@dataclasses.dataclass(frozen=True)
class Cell:
    """One case: the signal, the process that gets it, and the moment."""

    signal: str
    victim: str
    moment: str

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[f"SIG{self.signal}"]


@dataclasses.dataclass(frozen=True)
class Row:
    """How the processes of a cell ended, what run.json said then, and what differs after the restarts."""

    cell: Cell
    codes: list[int]
    """Exit codes of all processes after the signal."""
    seconds: float
    """From the signal to the end of the processes that did not get it, of all processes if all got it."""
    total_seconds: float
    """From the signal to the end of all processes."""
    status: str
    """Status and reason in run.json after the signal; empty before the run has a folder."""
    messages: list[str]
    """Last line of each process's console that begins with `maxhydra:` or names the outcome."""
    restarts: int
    differences: list[str]


class Matrix:
    """Runs cells of one task below a folder."""

    def __init__(
        self, folder: Path, launch: Launch, arguments: Sequence[str], *, processes: int = 2, resume: int | None = None
    ):
        """`resume`: number of processes after the signal, if it is another one."""
        self._folder, self._launch = folder, launch
        self._processes, self._resume = processes, resume or processes
        self._arguments = last_values([*arguments, "train.elastic=true"])

    def reference(self) -> dict[str, Any]:
        """The results of the undisturbed run."""
        folder = self._new_folder("reference")
        codes = self._run_to_end(self._processes, folder)
        if any(codes):
            raise RuntimeError(f"the undisturbed run ended with exit codes {codes}, see {folder / 'console.0'}")
        return self._read(folder)

    def run(self, cell: Cell, expected: dict[str, Any]) -> Row:
        """Signal the victims of a cell at its moment, then restart until the run finishes, and compare."""
        folder = self._new_folder(f"{cell.signal}-{cell.victim}-{cell.moment}")
        is_cold = cell.moment == "compile"
        processes = self._launch(self._processes, self._arguments, folder, is_cold=is_cold)
        victims = list(processes) if cell.victim == "all" else [processes[int(cell.victim)]]
        others = [process for process in processes if process not in victims]
        reached = _moment(cell, folder)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not reached():
            if time.monotonic() > deadline or not all(process.is_running() for process in processes):
                raise RuntimeError(f"{cell}: the moment was not reached, see {folder}")
            time.sleep(0.001)
        for process in victims:
            process.signal(cell.number)
        signalled_at = time.monotonic()
        codes = {id(process): process.wait(TIMEOUT_SECONDS) for process in others}
        seconds = time.monotonic() - signalled_at
        if cell.signal == "STOP":
            time.sleep(0 if others else STOP_SECONDS)
            for process in victims:
                process.signal(signal.SIGCONT)
        codes |= {id(process): process.wait(TIMEOUT_SECONDS) for process in victims}
        total = time.monotonic() - signalled_at
        status, messages = _status(folder), [_message(folder, index) for index in range(self._processes)]
        restarts, last = 0, list(codes.values())
        while any(last) and restarts < MAX_STARTS:
            last = self._run_to_end(self._resume, folder)
            restarts += 1
        found = self._read(folder)
        is_same = self._resume == self._processes
        differences = compare(expected, found) if is_same else list(_loss_differences(expected, found))
        if any(last):
            differences.append(f"the last command ended with exit codes {last}, see {folder}")
        # A victim may end by the signal itself; the others state a reason.
        aborted = {id(each) for each in processes if codes[id(each)] not in (0, *EXIT_CODES)}
        if aborted - {id(each) for each in victims if codes[id(each)] == -cell.number}:
            differences.append(f"a process was aborted or ended without a reason, see {folder}")
        ends = [codes[id(process)] for process in processes]
        return Row(
            cell,
            ends,
            seconds=round(seconds if others else total, 1),
            total_seconds=round(total, 1),
            status=status,
            messages=messages,
            restarts=restarts,
            differences=differences,
        )

    def _run_to_end(self, processes: int, folder: Path) -> list[int]:
        started = self._launch(processes, self._arguments, folder, is_cold=False)
        return [process.wait(TIMEOUT_SECONDS) for process in started]

    def _new_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        return folder

    def _read(self, folder: Path) -> dict[str, Any]:
        return dict(read_run("matrix", folder / "outputs" / "it")) if _facts(folder) else {}


def _loss_differences(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """The status, and the losses that differ by more than TOLERANCE."""
    if found.get("status") != expected["status"]:
        yield f"status: {found.get('status')}"
    rows, others = expected["metrics.jsonl"], found.get("metrics.jsonl", [])
    if [row["step"] for row in rows] != [row["step"] for row in others]:
        yield f"{len(others)} rows of metrics.jsonl, {len(rows)} expected"
    for row, other in zip(rows, others, strict=False):
        for name in row:
            if name.endswith("loss") and not math.isclose(row[name], other.get(name, 0), rel_tol=TOLERANCE):
                yield f"step {row['step']}: {name} {other.get(name)}, {row[name]} expected"


def _moment(cell: Cell, folder: Path) -> Callable[[], bool]:
    """Whether the run has reached the moment of a cell."""
    run = folder / "outputs" / "it"
    index = 0 if cell.victim == "all" else int(cell.victim)
    match cell.moment:
        case "init":
            return lambda: "Connecting to JAX distributed service" in _text(folder / f"console.{index}")
        case "compile":
            return lambda: "Compiling jit(step)" in _text(folder / f"console.{index}")
        case "step":
            return lambda: STEP in _steps(run)
        case "save":
            return lambda: any((run / "checkpoints").glob(f"{SAVE}.orbax-checkpoint-tmp*"))
        case _:
            # The row of a step is written before its evaluation begins.
            return lambda: EVAL in _steps(run)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _steps(run: Path) -> set[int]:
    complete = _text(run / "metrics.jsonl").rpartition("\n")[0]
    return {json.loads(line)["step"] for line in complete.splitlines()}


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / "outputs" / "it" / "run.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _status(folder: Path) -> str:
    facts = _facts(folder)
    return f"{facts['status']}: {facts.get('reason')}" if facts else ""


def _message(folder: Path, index: int) -> str:
    starts = ("maxhydra:", "preempted:", "finished:", "failed:")
    lines = _text(folder / f"console.{index}").splitlines()
    found = [number for number, line in enumerate(lines) if line.startswith(starts)]
    # The header of config problems is followed by the first of them.
    return " ".join(lines[found[-1] :][:2] if "problem" in lines[found[-1]] else [lines[found[-1]]]) if found else ""


def launch(processes: int, arguments: Sequence[str], folder: Path, *, is_cold: bool) -> Sequence[Process]:
    """Start the command in processes on this machine that have already imported jax."""
    from tests.support.cli import start_processes  # noqa: PLC0415

    cache = [f"hardware.compilation_cache={tempfile.mkdtemp(dir=folder)}"] if is_cold else []
    return start_processes(processes, *arguments, *cache, cwd=folder)


def format_table(rows: Sequence[Row]) -> Iterator[str]:
    """Exit codes and seconds of all cells as Markdown."""
    by_cell = {row.cell: row for row in rows}
    yield f"| signal | process | {' | '.join(MOMENTS)} |"
    yield f"|---|---|{'---|' * len(MOMENTS)}"
    for name, victim in dict.fromkeys((row.cell.signal, row.cell.victim) for row in rows):
        found = [by_cell.get(Cell(name, victim, moment)) for moment in MOMENTS]
        yield f"| {name} | {victim} | {' | '.join(map(_describe, found))} |"


def _describe(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{', '.join(map(str, row.codes))}: {row.seconds:g} s{' DIFFERENT' if row.differences else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="pretrain", choices=TASKS)
    parser.add_argument("--signal", nargs="+", default=SIGNALS, choices=SIGNALS)
    parser.add_argument("--victim", nargs="+", default=VICTIMS, choices=VICTIMS)
    parser.add_argument("--moment", nargs="+", default=MOMENTS, choices=MOMENTS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--resume-processes", type=int, help="processes after the signal; the same number by default")
    parser.add_argument("--override", nargs="+", default=[], help="further settings of the run")
    parser.add_argument("--folder", type=Path, help="empty folder for all files; a temporary one by default")
    parser.add_argument("--report", type=Path, help="JSON file with all rows")
    args = parser.parse_args()
    sys.path.append(str(ROOT))
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="death-matrix-"))).absolute()
    # Compilations and the start of jax.distributed are recognized by the lines that jax logs.
    os.environ |= {"JAX_LOG_COMPILES": "1", "JAX_LOGGING_LEVEL": "INFO", **environment(folder / "cache")}
    counts = {"processes": args.processes, "resume": args.resume_processes}
    matrix = Matrix(folder, launch, [*TASKS[args.task], *args.override], **counts)
    expected = matrix.reference()
    rows = []
    for cell in (Cell(*names) for names in itertools.product(args.signal, args.victim, args.moment)):
        rows.append(matrix.run(cell, expected))
        print(dataclasses.asdict(rows[-1]), flush=True)
        if args.report is not None:
            args.report.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    failed = [row for row in rows if row.differences]
    print("\n".join(format_table(rows)))
    print(f"{len(rows) - len(failed)} of {len(rows)} cells equal, files in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
