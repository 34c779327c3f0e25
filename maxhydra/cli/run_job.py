"""Runs a task, and says how it ended, where the run lies and what to try next."""

import errno
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxhydra import tasks
from maxhydra.cli.main import RunFailed
from maxhydra.config import Config
from maxhydra.config.compose.provenance import display_path
from maxhydra.record import RunDirectory
from maxhydra.runs import write_report
from maxhydra.tasks import Result

# 128 and the signal's number, as a shell reports a process that a signal ended.
INTERRUPTED = {"SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143}


def execute(
    config: Config, choices: dict[str, str], *, overrides: list[str], path: Path | None, config_dir: str | None = None
) -> float | None:
    """The objective of the run. `path` is its folder in a sweep; a run that stands alone is told how to go on.

    `config_dir`: the folder of options that the config was composed with, where the command does not name it.
    """
    with _disk_errors_explained():
        result = tasks.run(config, choices=choices, overrides=overrides, path=path, config_dir=config_dir)
    if result.path is not None and result.writes:
        folder = RunDirectory(result.path, writes=False)
        try:
            write_report(folder)
        except OSError as error:
            print(f"maxhydra: report.html could not be written: {error.strerror}", file=sys.stderr)
        lines = [*_ending(result, folder, config)]
        lines += _next(result, folder, config, overrides) if path is None else []
        print("\n".join(lines), flush=True)
    if result.status == "failed":
        raise RunFailed(result.reason)
    if result.status == "preempted":
        # Not an Exception: a sweep that was asked to end must not go on with its next job.
        raise SystemExit(INTERRUPTED[result.reason.split()[0]])
    return result.objective


@contextmanager
def _disk_errors_explained() -> Iterator[None]:
    """A full disk is not a bug: say so in a line. Whatever was written before is whole."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise RunFailed(f"{error.strerror}{where}; make room, and the same command goes on") from error


def _ending(result: Result, folder: RunDirectory, config: Config) -> Iterator[str]:
    """The sample, how the run ended, and where it lies."""
    if sample := folder.read().get("sample"):
        yield f"\n{sample.strip()}\n"
    value = "" if result.objective is None else f", {config.objective} {result.objective:.4g}"
    yield f"{result.status}: {result.reason}{value}"
    yield f"run:    {display_path(folder.path)}"
    yield f"report: {display_path(folder.report_path)}"


def _next(result: Result, folder: RunDirectory, config: Config, overrides: list[str]) -> Iterator[str]:
    """The command that goes on with this run, where there is something to go on from."""
    if not folder.checkpoints.is_dir():
        yield "next:   maxhydra --help, maxhydra explain train    # what else can be set"
        return
    name = folder.path.relative_to(Path(config.run.outputs).absolute())
    command = shlex.join(["maxhydra", *_without(overrides, "run.name", "train.steps"), f"run.name={name}"])
    if result.status == "finished":
        yield f"next:   {command} train.steps={2 * config.train.steps}    # goes on, twice as long"
        yield "        maxhydra --help, maxhydra explain train    # what else can be set"
    else:
        yield f"next:   {command} train.steps={config.train.steps}    # goes on from the last checkpoint"


def _without(overrides: list[str], *keys: str) -> list[str]:
    return [override for override in overrides if override.lstrip("+").partition("=")[0] not in keys]
