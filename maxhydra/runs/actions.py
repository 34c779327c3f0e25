"""Changes to runs: tag, note, stop and resume, for the verbs of `maxhydra runs` and the buttons of the dashboard."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import maxhydra
from maxhydra.config.errors import ConfigError, Problem, quoted
from maxhydra.config.schema.config import Config
from maxhydra.config.schema.run import control_problems
from maxhydra.record import RunDirectory, redact_text
from maxhydra.record.atomic_io import is_alive
from maxhydra.record.facts import SWEEP_FILE
from maxhydra.record.labels import LABELS
from maxhydra.record.storage import is_remote
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.rerun import rerun_arguments

# Output of a run that was resumed in the background, in its folder.
CONSOLE = "console.txt"
# Time in which a run that cannot start, for example because of its config, reports why.
START_SECONDS = 5.0
# Time limit of `maxhydra sweep cancel`, which may ask a scheduler.
CANCEL_SECONDS = 60.0
# End of the output that an error message contains.
MAX_ERROR = 2000


def change_tags(registry: Registry, run: Run, *, add: Sequence[str], remove: Sequence[str]) -> list[str]:
    """Add and remove tags of a run, also of a running one; returns its tags."""
    bad = [tag for tag in (*add, *remove) if not tag.strip() or "," in tag]
    if bad:
        raise ConfigError(Problem("tag", "is empty or contains a comma", value=bad[0]))
    if problems := list(control_problems("tag", add)):
        raise ConfigError(problems)
    if missing := [tag for tag in remove if tag not in run.tags]:
        accepted = ", ".join(run.tags) or "the run has none"
        raise ConfigError([Problem("--remove", "the run has no such tag", tag, accepted) for tag in missing])
    if add or remove:
        _label(registry.directory(run), add=add, remove=remove)
    return list(registry.facts(run)["tags"])


def change_note(registry: Registry, run: Run, text: str) -> str:
    """Replace the note of a run, also of a running one; returns its note."""
    if problems := list(control_problems("note", [text], keep="\n\t")):
        raise ConfigError(problems)
    _label(registry.directory(run), note=text)
    return str(registry.facts(run)["notes"] or "")


def _label(directory: RunDirectory, **changes: Any) -> None:
    """Change tags and note; raise ConfigError if the existing ones cannot be read and would be overwritten."""
    try:
        directory.label(**changes)
    except ValueError as error:
        hint = "repair or delete the file"
        raise ConfigError(Problem(str(directory.path / LABELS), f"cannot be read: {error}", hint=hint)) from None


def live_process(registry: Registry, run: Run) -> int | None:
    """Process of a run on this machine; None if it is not running here."""
    session = registry.facts(run)["sessions"][-1]
    is_live = run.status == "running" and is_alive(session["host"], session["pid"], session["pid_started"])
    return int(session["pid"]) if is_live else None


def stop_run(registry: Registry, run: Run) -> str:
    """Ask a live run of this machine to save a checkpoint and exit, by SIGTERM; returns what happens next."""
    if run.status != "running":
        raise ConfigError(Problem(run.path, f"is not running: {run.status}", accepted="a running run"))
    pid = live_process(registry, run)
    if pid is None:
        hint = f"on {run.host}: maxhydra runs stop; jobs of a sweep: maxhydra sweep cancel"
        raise ConfigError(Problem(run.path, f"runs on another machine, {run.host}", hint=hint))
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        reason = "belongs to another user"
        raise ConfigError(Problem(run.path, reason, value=f"process {pid}", hint="ask its owner")) from None
    except ProcessLookupError:
        return f"{run.path} has just ended"
    restart = ""
    if (registry.root / run.path).parent.joinpath(SWEEP_FILE).exists():
        restart = f"; a sweep restarts its jobs: maxhydra sweep cancel {run.sweep} ends all of them"
    return f"{run.path} saves a checkpoint and stops{restart}"


def resume_arguments(registry: Registry, run: Run, changes: Sequence[str] = ()) -> tuple[list[str], str]:
    """Arguments of `maxhydra` that resume a run from its last checkpoint, and the folder to start it in."""
    directory = registry.directory(run)
    facts = directory.read()
    outputs = registry.location
    if not is_remote(outputs):
        outputs = os.path.relpath(registry.root.resolve(), facts["folder"])
    changes = [*changes, f"run.outputs={quoted(outputs)}"]
    return rerun_arguments(facts, run.path, *changes, config=read_config(directory)), str(facts["folder"])


def read_config(directory: RunDirectory) -> Config | None:
    """The config of a run; None if it cannot be read."""
    # Imported here, because it imports omegaconf, which the other actions do not need.
    from maxhydra.config.serialize import from_yaml  # noqa: PLC0415

    try:
        return from_yaml(directory.config_path.read_text(encoding="utf-8"), is_run=True)
    except (OSError, ConfigError):
        return None


def start_command(arguments: Sequence[str], folder: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run `maxhydra` with this code; ConfigError if the folder is gone."""
    if not Path(folder).is_dir():
        raise ConfigError(Problem("folder", "in which the run was started no longer exists", value=folder))
    package = Path(maxhydra.__file__).parent.parent
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-m", "maxhydra", *arguments], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def resume_in_background(registry: Registry, run: Run) -> str:
    """Resume a run in a separate session, which outlives this process; ConfigError if it ends at once."""
    if run.status == "running":
        raise ConfigError(Problem(run.path, f"is still running on {run.host}", accepted="a run that has ended"))
    arguments, folder = resume_arguments(registry, run)
    command, environment = start_command(arguments, folder)
    console = registry.root / run.path / CONSOLE
    with console.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        # A child that has ended and was not waited for is a zombie, which looks alive.
        threading.Thread(target=process.wait, daemon=True).start()
        return f"{run.path} resumes; output: {console}"
    if code:
        with console.open("rb") as output:
            output.seek(start)
            text = redact_text(output.read().decode(errors="replace")).strip()[-MAX_ERROR:]
        raise ConfigError(Problem(run.path, f"did not resume: exit code {code}: {text}"))
    return f"{run.path} was resumed and has ended"


def cancel_sweep(registry: Registry, name: str) -> str:
    """Ask the running jobs of a sweep to save and exit, and return the output of `maxhydra sweep cancel`."""
    folder = registry.root.resolve() / name
    # A separate process: the sweep package imports optuna and the clients of schedulers.
    command, environment = start_command(["sweep", "cancel", str(folder)], str(folder))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CANCEL_SECONDS, check=False)
    if done.returncode:
        raise ConfigError(Problem(name, f"was not cancelled: {redact_text(done.stderr).strip()[-MAX_ERROR:]}"))
    return redact_text(done.stdout).strip()
