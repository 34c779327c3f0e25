"""A run whose `run.outputs` is a URL: it works in a local copy of its folder, which is mirrored to the store.

The run folder keeps its locks, renames and appended files, which stores do not have. One background thread uploads the
files that have changed, another one the checkpoints (checkpoint_tiers.py). A session starts from the copy with the
later sessions: usually the local one, which is ahead of the store if its process was killed.
"""

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from maxhydra.record.atomic_io import is_alive, process_start
from maxhydra.record.checkpoint_tiers import CHECKPOINTS, CheckpointTiers, Retention
from maxhydra.record.facts import FACTS, Facts, parse_facts
from maxhydra.record.run_dir import RunInUseError
from maxhydra.record.storage import StorageError, Store

log = logging.getLogger("maxhydra")

# Seconds between two searches for changed files, which are uploaded, and for new checkpoints.
INTERVAL, CHECKPOINT_INTERVAL = 5.0, 1.0
# A file that keeps changing is uploaded as a whole each time, so a large one only at this average rate.
BYTES_PER_SECOND = 2**20
LEASE = ".lease.json"
# A lease that was not renewed for this long belongs to a process that is gone, unless clocks differ by as much.
LEASE_SECONDS = 60.0


class LeaseLostError(StorageError):
    """Another process writes the run now."""


class Lease:
    """An object in the store that names the process that writes the run. It expires if it is not renewed.

    Exclusive in stores with conditional writes (S3, GCS). In others, two processes that start at the same moment can
    both acquire it; the one whose lease is overwritten stops uploading.
    """

    def __init__(self, store: Store):
        self._store, self._token = store, secrets.token_hex(8)

    def acquire(self) -> None:
        """Wait for the lease of a process that is gone; raises RunInUseError if its process is alive."""
        while not self._store.create(LEASE, self._content()):
            holder = self._read()
            if holder is None:
                continue
            if holder["token"] == self._token:
                return
            if not self._has_ended(holder):
                owner = f"process {holder['pid']} on {holder['host']}"
                raise RunInUseError(f"{self._store.url} is being written by another process ({owner})")
            self._store.delete([LEASE])

    def renew(self) -> None:
        """Raises LeaseLostError if another process has acquired the lease."""
        holder = self._read()
        if holder is None or holder["token"] == self._token:
            self._store.write(LEASE, self._content())
            return
        reason = f"process {holder['pid']} on {holder['host']} writes the run now, because this process was silent"
        raise LeaseLostError("write", self._store.url, reason)

    def release(self) -> None:
        holder = self._read()
        if holder is not None and holder["token"] == self._token:
            self._store.delete([LEASE])

    def _has_ended(self, holder: Facts) -> bool:
        """Whether the holder is gone. On another host this is known by its silence, for which this waits."""
        alive = is_alive(holder["host"], holder["pid"], holder["pid_started"])
        if alive is not None:
            return not alive
        if (silence := time.time() - holder["time"]) < LEASE_SECONDS:
            log.info("%s was written by %s %.0f s ago; waiting", self._store.url, holder["host"], silence)
        while (silence := time.time() - holder["time"]) < LEASE_SECONDS:
            time.sleep(min(INTERVAL, LEASE_SECONDS - silence + 0.1))
            latest = self._read()
            if latest is None:
                return True
            if latest != holder:
                return False
        return True

    def _content(self) -> bytes:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": process_start(os.getpid())}
        return json.dumps({"token": self._token, **owner, "time": time.time()}).encode()

    def _read(self) -> Facts | None:
        try:
            return dict(json.loads(self._store.read(LEASE)))
        except FileNotFoundError:
            return None


class Mirror:
    """The copy of one run folder in a store; used by the process that writes the run."""

    def __init__(self, url: str, folder: Path, retention: Retention):
        self._store, self._folder = Store(url), folder
        self._lease = Lease(self._store)
        self._tiers = CheckpointTiers(self._store, folder, retention)
        self._uploaded: dict[str, tuple[int, int, int]] = {}
        self._upload_times: dict[str, float] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._lost: LeaseLostError | None = None

    def open(self) -> None:
        """Acquire the run, and bring the local copy up to date. Raises RunInUseError and StorageError."""
        self._lease.acquire()
        try:
            names = self._store.find()
            remote, local = self._read_remote_facts(names), _read_facts(self._folder / FACTS)
            if _has_later_sessions(remote, local):
                self._replace_working_copy()
                local = None
            if local is None:
                self._download([name for name in names if not name.startswith((f"{CHECKPOINTS}/", "."))])
            self._tiers.open(names)
        except BaseException:
            self._lease.release()
            raise

    def start(self) -> None:
        """Make the newest intact checkpoint available, then upload in the background. Raises StorageError."""
        self._tiers.prepare_newest()
        for action, interval in ((self._sync_files, INTERVAL), (self._sync_checkpoints, CHECKPOINT_INTERVAL)):
            thread = threading.Thread(target=self._repeat, args=(action, interval), name="mirror", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self, patience: float) -> None:
        """Upload all that is missing, and release the run. Failed uploads are repeated for `patience` seconds.

        Raises StorageError; the local copy is complete.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join()
        deadline = time.monotonic() + patience
        while True:
            try:
                self._finish()
                return
            except StorageError as error:
                if self._lost is not None or time.monotonic() > deadline:
                    with contextlib.suppress(StorageError):
                        self._lease.release()
                    raise
                log.warning("%s; repeated for %.0f s", error, deadline - time.monotonic())
                time.sleep(INTERVAL)

    def _finish(self) -> None:
        self._renew_lease()
        if (self._folder / FACTS).exists():
            self._sync_checkpoints(is_final=True)
            self._upload_files(is_forced=True, is_final=True)
        else:
            # A session that could not start has removed the folder of its new run.
            self._store.delete(list(self._uploaded))
        self._lease.release()

    def _repeat(self, action: Callable[[], None], interval: float) -> None:
        has_failed = False
        while not self._stop.wait(INTERVAL if has_failed else interval):
            try:
                action()
                has_failed = False
            except LeaseLostError as error:
                log.error("%s; nothing more is uploaded, the run continues in %s", error, self._folder)
                return
            except (StorageError, OSError) as error:
                if not has_failed:
                    log.warning("%s; repeated every %.0f s, the run continues in %s", error, INTERVAL, self._folder)
                has_failed = True

    def _sync_files(self) -> None:
        self._renew_lease()
        self._upload_files()

    def _sync_checkpoints(self, *, is_final: bool = False) -> None:
        # The metrics up to a checkpoint are in the store before it, and so they are on disk.
        self._tiers.upload(before_commit=self._upload_all_files, is_final=is_final)

    def _renew_lease(self) -> None:
        try:
            self._require_lease()
            self._lease.renew()
        except LeaseLostError as error:
            self._lost = error
            raise

    def _require_lease(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _upload_all_files(self) -> None:
        self._require_lease()
        self._upload_files(is_forced=True)

    def _upload_files(self, *, is_forced: bool = False, is_final: bool = False) -> None:
        """Upload the files that have changed, except checkpoints; run.json last, because it says that all is done.

        `is_final`: all checkpoints are in the store. Only then is the end of the run uploaded: otherwise another host
        would regard a run as finished whose last checkpoint is on this one alone.
        """
        with self._lock:
            for name in sorted(_small_files(self._folder), key=lambda name: name == FACTS):
                with contextlib.suppress(FileNotFoundError):
                    state = _state(self._folder / name)
                    age = time.monotonic() - self._upload_times.get(name, -math.inf)
                    is_due = is_forced or age >= state[0] / BYTES_PER_SECOND
                    if not is_due or self._uploaded.get(name) == state:
                        continue
                    if name != FACTS or is_final:
                        self._store.upload(self._folder / name, name)
                    elif not self._upload_running():
                        continue
                    self._uploaded[name], self._upload_times[name] = state, time.monotonic()

    def _upload_running(self) -> bool:
        """Upload run.json if it says that the run is running; return whether it does."""
        content = (self._folder / FACTS).read_bytes()
        try:
            is_running = bool(parse_facts(content)["status"] == "running")
        except ValueError:
            return False
        if is_running:
            self._store.write(FACTS, content)
        return is_running

    def _download(self, names: Collection[str]) -> None:
        self._store.map(lambda name: self._store.download(name, self._folder / name), names)
        self._uploaded = {name: _state(self._folder / name) for name in names}

    def _read_remote_facts(self, names: Collection[str]) -> Facts | None:
        try:
            return parse_facts(self._store.read(FACTS)) if FACTS in names else None
        except (ValueError, FileNotFoundError) as error:
            log.warning("%s/%s %s", self._store.url, FACTS, error)
            return None

    def _replace_working_copy(self) -> None:
        """Move the local copy aside: another host has continued the run, from a checkpoint in the store."""
        if self._folder.exists():
            aside = self._folder.with_name(f".superseded-{self._folder.name}-{secrets.token_hex(4)}")
            self._folder.rename(aside)
            log.warning("%s is ahead of %s, which is moved to %s", self._store.url, self._folder, aside)


def _small_files(folder: Path) -> Iterator[str]:
    """Names of all files of a run, except checkpoints and hidden files."""
    for root, folders, files in os.walk(folder):
        inner = Path(root).relative_to(folder)
        folders[:] = [name for name in folders if name[0] != "." and (inner / name).as_posix() != CHECKPOINTS]
        yield from ((inner / name).as_posix() for name in files if name[0] != ".")


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read_facts(path: Path) -> Facts | None:
    try:
        return parse_facts(path.read_bytes())
    except (OSError, ValueError):
        return None


def _has_later_sessions(remote: Facts | None, local: Facts | None) -> bool:
    """Whether the store has sessions that the local copy does not have, and is newer."""
    if remote is None or local is None:
        return remote is not None
    local_ids, remote_ids = (
        [(session["started"], session["host"], session["pid"]) for session in facts["sessions"]]
        for facts in (local, remote)
    )
    return remote_ids != local_ids[: len(remote_ids)] and remote["updated"] >= local["updated"]
