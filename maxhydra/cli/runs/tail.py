"""Show the end of a run's log, and what is added: tail [RUN] [-n LINES] [-f]; the newest run without a name.

maxhydra runs tail lr/3 -f

Of a job that has not begun, it is what the job has printed so far, which says why it does not begin.
"""

import argparse
import time
from pathlib import Path

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import CLAIM, CONSOLE
from maxhydra.record import RunDirectory
from maxhydra.runs.registry import Registry

_PAUSE = 0.5
# Read from the end: enough for any number of lines that a person asks for.
_WINDOW = 1 << 20


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("-n", "--lines", type=int, default=20)
    parser.add_argument("-f", "--follow", action="store_true", help="until the run ends")


def run(asked: argparse.Namespace) -> int:
    waiting = _waiting(Path(asked.outputs), asked.name)
    if waiting is not None:
        position = _print_end(waiting.path / CONSOLE, asked.lines)
        while asked.follow and not waiting.exists():
            time.sleep(_PAUSE)
            position = _print_from(waiting.path / CONSOLE, position)
        if not waiting.exists():
            print(f"{waiting.path}: has not begun")
            return 0
    registry = Registry(asked.outputs)
    runs = registry.runs()
    if not runs:
        raise ConfigError(Problem("runs tail", f"{asked.outputs} holds no runs"))
    directory = registry.directory(registry.find(asked.name, runs) if asked.name else runs[0])
    position = _print_end(directory.log_path, asked.lines)
    while asked.follow:
        # Asked before the log is read: what was written before the end is then sure to be seen.
        is_running = directory.read()["status"] == "running"
        position = _print_from(directory.log_path, position)
        if not is_running:
            break
        time.sleep(_PAUSE)
    facts = directory.read()
    print(f"{directory.path}: {facts['status']}{': ' + facts['reason'] if facts['reason'] else ''}")
    return 0


def _waiting(outputs: Path, name: str | None) -> RunDirectory | None:
    """The folder of a job that was started or submitted, and is not a run yet."""
    run = RunDirectory(outputs / (name or ""), writes=False)
    return run if name and (run.path / CLAIM).exists() and not run.exists() else None


def _print_end(log: Path, lines: int) -> int:
    """The last lines; gives the place after them."""
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
