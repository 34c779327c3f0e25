"""Runs a task, then prints how it ended, where its files are, and what to run next."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxhydra import tasks
from maxhydra.cli.main import FAILED, FILE_ERRORS, RunFailed, describe_file_error
from maxhydra.config import Config, ConfigError
from maxhydra.config.yaml_files import display_path
from maxhydra.record import RunDirectory
from maxhydra.record.storage import StorageError, Store
from maxhydra.runs import write_report
from maxhydra.runs.rerun import rerun_arguments
from maxhydra.runtime import peers, signals
from maxhydra.tasks import Result


def execute(
    config: Config, choices: dict[str, str], *, overrides: list[str], path: Path | None, config_dir: str | None = None
) -> float | None:
    """Run a task and return its objective.

    `path` is the run's folder in a sweep. A single run (None) also prints the command that resumes it. `config_dir` is
    the folder of options that the config was composed with, if the command line does not contain it.
    """
    with signals.installed():
        try:
            with _explain_file_errors():
                result = tasks.run(config, choices=choices, overrides=overrides, path=path, config_dir=config_dir)
        except signals.Interrupted as error:
            signals.print_interruption(error)
            peers.set_exit_code(code := signals.exit_code(str(error)))
            raise SystemExit(code) from None
        if result.path is not None and result.writes:
            folder = RunDirectory(result.path, writes=False)
            _report(result, folder, config, is_single=path is None)
    if result.status == "failed":
        peers.set_exit_code(FAILED)
        raise RunFailed(result.reason)
    if result.status == "preempted":
        peers.set_exit_code(code := signals.exit_code(result.reason))
        # SystemExit is not an Exception, so an interrupted sweep does not start its next job.
        raise SystemExit(code)
    return result.objective


def _report(result: Result, folder: RunDirectory, config: Config, *, is_single: bool) -> None:
    """Write report.html, and print how the run ended and, for a single run, what to run next."""
    write_run_report(result)
    lines = [*_outcome(result, folder, config)]
    lines += _next_steps(result, folder, config) if is_single else []
    print("\n".join(lines), flush=True)


def write_run_report(result: Result) -> None:
    """Write report.html; a failure is printed and does not change the result."""
    assert result.path is not None
    folder = RunDirectory(result.path, writes=False)
    try:
        write_report(folder)
        if result.url is not None:
            Store(result.url).upload(folder.report_path, folder.report_path.name)
    except OSError as error:
        print(f"maxhydra: report.html could not be written: {error.strerror}", file=sys.stderr)
    except StorageError as error:
        print(f"maxhydra: report.html could not be uploaded: {error}", file=sys.stderr)


@contextmanager
def _explain_file_errors() -> Iterator[None]:
    """Report a full or protected disk in one line instead of a traceback. Files that were written are complete."""
    try:
        yield
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        raise RunFailed(describe_file_error(error)) from error


def _outcome(result: Result, folder: RunDirectory, config: Config) -> Iterator[str]:
    """Yield the sample, the status and the folder of a run."""
    if sample := folder.read().get("sample"):
        yield f"\n{sample.strip()}\n"
    value = "" if result.objective is None else f", {config.objective} {result.objective:.4g}"
    yield f"{result.status}: {result.reason}{value}"
    yield f"run:    {display_path(folder.path) if result.url is None else result.url}"
    yield f"report: {display_path(folder.report_path)}"


def _next_steps(result: Result, folder: RunDirectory, config: Config) -> Iterator[str]:
    """Yield the command that resumes this run, if it has a checkpoint, and where to find more settings."""
    if not folder.checkpoints.is_dir():
        yield "next:   maxhydra --help, maxhydra explain train    # all settings"
        return
    is_finished = result.status == "finished"
    name = folder.path.relative_to(config.run.folder().absolute()).as_posix()
    # train.epochs replaces train.steps.
    key, length = ("steps", config.train.steps) if config.train.epochs is None else ("epochs", config.train.epochs)
    steps = f"train.{key}={2 * length if is_finished else length}"
    try:
        command = shlex.join(["maxhydra", *rerun_arguments(folder.read(), name, steps)])
    except ConfigError:  # The command contained a secret.
        command = f"maxhydra runs resume {shlex.quote(name)} {steps} KEY=SECRET"
    yield f"next:   {command}    # resume {'and train twice as long' if is_finished else 'from the last checkpoint'}"
    if is_finished:
        yield "        maxhydra --help, maxhydra explain train    # all settings"
