"""Runs whose outputs are a URL: the working copy is opened before the run's session and uploaded after it."""

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Protocol

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.metrics import is_maximized
from maxhydra.record import RunDirectory, logging_to
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.checkpoint_tiers import Retention
from maxhydra.record.mirror import Mirror
from maxhydra.record.storage import StorageError, Store, is_remote
from maxhydra.runtime import Machine, signals
from maxhydra.runtime.channel import broadcast

log = logging.getLogger("maxhydra")
TOKEN = ".process-0"
# Seconds for which the end of a run repeats uploads that fail.
FINAL_SECONDS = 300.0
# Time in which a file of one host appears on another one. NFS caches listings for up to a minute.
VISIBLE_SECONDS = 70.0


class Storage(Protocol):
    """Where a run is stored in addition to its folder."""

    def start(self) -> None:
        """Make the checkpoint to resume from available, before the session reads the run's folder."""
        ...


class LocalOnly:
    """The storage of a run in a local folder, and of the processes that do not write the run."""

    def start(self) -> None:
        return


def check_reachable(config: Config) -> None:
    """Raise ConfigError if run.outputs is a URL that cannot be read: before devices are initialized."""
    if is_remote(config.run.outputs):
        with _as_config_errors(config):
            Store(config.run.outputs).children()


@contextlib.contextmanager
def stored_run(config: Config, run: RunDirectory, machine: Machine) -> Iterator[Storage]:
    """Mirror a run to its URL inside, and upload the rest at the end.

    Raises ConfigError before, and StorageError if the last upload fails; an error inside is not replaced.
    """
    if (url := config.run.url(run.path)) is None:
        yield LocalOnly()
        return
    mirror = _open_mirror(config, run, url) if run.writes else None
    _require_shared_folder(config, run, machine)
    try:
        yield LocalOnly() if mirror is None else mirror
    except BaseException as error:
        if mirror is not None:
            with contextlib.suppress(StorageError):  # named in the log; the first error is the cause
                _close(mirror, patience=0 if isinstance(error, StorageError) else FINAL_SECONDS)
        raise
    if mirror is not None:
        _close(mirror, patience=FINAL_SECONDS)


def _close(mirror: Mirror, *, patience: float) -> None:
    # A preempted run would end in seconds if its upload did not defer that.
    with logging_to(None, console=True), signals.Deferral() as deferral:
        deferral.start()
        try:
            mirror.close(patience)
        except StorageError as error:
            log.error("%s", error)
            raise


def _open_mirror(config: Config, run: RunDirectory, url: str) -> Mirror:
    checkpoint = config.checkpoint
    retention = Retention(
        checkpoint.keep,
        checkpoint.keep_best,
        checkpoint.best_metric,
        checkpoint.persist_every,
        is_maximized(checkpoint.best_metric),
    )
    with _as_config_errors(config), logging_to(None, console=True):
        mirror = Mirror(url, run.path, retention)
        mirror.open()
    return mirror


@contextlib.contextmanager
def _as_config_errors(config: Config) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        hint = "check the address, the network and the credentials"
        raise ConfigError(Problem("run.outputs", str(error), value=config.run.outputs, hint=hint)) from error


def _require_shared_folder(config: Config, run: RunDirectory, machine: Machine) -> None:
    """Raise ConfigError if a process does not see the working copy, to which each writes its part of a checkpoint."""
    if machine.process_count == 1:
        return
    token, path = secrets.token_hex(8), run.path / TOKEN
    if run.writes:
        run.path.mkdir(parents=True, exist_ok=True)
        replace_file(path, token)
    token, deadline = broadcast(token), time.monotonic() + VISIBLE_SECONDS
    while not (path.exists() and path.read_text(encoding="utf-8") == token):
        if time.monotonic() > deadline:
            reason = f"is not the folder of process 0 in process {machine.process_index}: {run.path} differs"
            hint = "set run.staging to a folder that all hosts share"
            raise ConfigError(Problem("run.staging", reason, value=config.run.staging, hint=hint))
        time.sleep(0.5)
