"""Show the end of a run's log and follow it: tail [RUN] [-n LINES] [-f]; default: the newest run.

maxhydra runs tail lr/3 -f

For a job that has not started its run yet, shows the output of the job, which says why.
"""

import argparse
import time
from pathlib import Path

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import CLAIM, CONSOLE
from maxhydra.record import RunDirectory
from maxhydra.runs.registry import Registry

_PAUSE = 0.5
# Bytes that are read from the end of the log.
_WINDOW = 1 << 20


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("-n", "--lines", type=int, default=20)
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")


def run(args: argparse.Namespace) -> int:
    pending = _pending_job(Path(args.outputs), args.name)
    if pending is not None:
        position = _print_end(pending.path / CONSOLE, args.lines)
        while args.follow and not pending.exists():
            time.sleep(_PAUSE)
            position = _print_from(pending.path / CONSOLE, position)
        if not pending.exists():
            print(f"{pending.path}: has not started yet")
            return 0
    registry = Registry(args.outputs)
    runs = registry.runs()
    if not runs:
        raise ConfigError(Problem("runs tail", f"no runs in {args.outputs}"))
    directory = registry.directory(registry.find(args.name, runs) if args.name else runs[0])
    position = _print_end(directory.log_path, args.lines)
    while args.follow:
        # Read the status before the log, so that the last lines of a run that ends in between are still printed.
        is_running = directory.read()["status"] == "running"
        position = _print_from(directory.log_path, position)
        if not is_running:
            break
        time.sleep(_PAUSE)
    facts = directory.read()
    print(f"{directory.path}: {facts['status']}{': ' + facts['reason'] if facts['reason'] else ''}")
    return 0


def _pending_job(outputs: Path, name: str | None) -> RunDirectory | None:
    """Return the folder of a job that was started or submitted but has no run yet."""
    run = RunDirectory(outputs / (name or ""), writes=False)
    return run if name and (run.path / CLAIM).exists() and not run.exists() else None


def _print_end(log: Path, lines: int) -> int:
    """Print the last lines and return the position after them."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _WINDOW))
        content = file.read(size - file.tell())
    last = content.decode(errors="replace").splitlines()[-lines:] if lines > 0 else []
    print("\n".join(last), flush=True, end="\n" if last else "")
    return size


def _print_from(log: Path, position: int) -> int:
    if not log.exists():
        return position
    with log.open("rb") as file:
        file.seek(position)
        content = file.read()
    print(content.decode(errors="replace"), end="", flush=True)
    return position + len(content)
