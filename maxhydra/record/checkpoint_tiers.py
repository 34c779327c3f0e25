"""The checkpoints of a run in two tiers: its local folder, and a store.

The run saves to the local folder. Those that belong into the store are uploaded after their local commit, data files
first and manifest.json last, so that a checkpoint in the store is complete or does not exist. A session resumes from
the newest step of both tiers. Its files are verified first; damage is named, and the same step of the other tier or the
previous step is used instead.
"""

import contextlib
import dataclasses
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from maxhydra.record.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    parse_manifest,
    read_manifest,
    verify_files,
)
from maxhydra.record.metrics import series
from maxhydra.record.storage import StorageError, Store, complete_steps

log = logging.getLogger("maxhydra")

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
# Hard links of the checkpoint that is being uploaded: the run may delete its own meanwhile.
PINNED = ".upload"
# Suffix of a folder that is being downloaded. Orbax deletes those that a killed process leaves behind.
PARTIAL = ".orbax-checkpoint-tmp-download"
# Suffix of the manifest of a damaged checkpoint in the store.
DAMAGED = ".damaged"


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are in the store: the fields of the config section `checkpoint`."""

    keep: int
    keep_best: int
    best_metric: str
    persist_every: int | None
    is_maximized: bool = False
    """Whether larger values of best_metric are better."""

    def is_persistent(self, step: int) -> bool:
        return self.persist_every is None or step % self.persist_every == 0

    def select(self, steps: Collection[int], metrics: Mapping[int, float]) -> set[int]:
        """The newest and the best of these steps."""
        ranked = {step: metrics[step] for step in steps if step in metrics}
        return {*sorted(steps)[-self.keep :], *best_steps(ranked, self.keep_best, largest=self.is_maximized)}


def best_steps(metrics: Mapping[int, float], count: int, *, largest: bool = False) -> list[int]:
    """The steps with the lowest or largest metric, the newest of equal ones. NaN is the worst value."""
    sign = -1 if largest else 1
    ranks = {step: (math.inf if math.isnan(value) else sign * value, -step) for step, value in metrics.items()}
    return sorted(ranks, key=ranks.__getitem__)[:count]


class CheckpointTiers:
    """The checkpoints below the folder of a run and below its URL. One process writes both."""

    def __init__(self, store: Store, run: Path, retention: Retention):
        self._store, self._run, self._retention = store, run, retention
        self._folder = run / CHECKPOINTS
        self._remote: dict[int, str] = {}
        """Complete checkpoints in the store: step -> digest of the manifest; empty if it cannot be read."""
        self._skipped: set[str] = set()

    def open(self, names: Collection[str]) -> None:
        """Read the checkpoints in the store, by the names of its objects, and delete those of interrupted uploads."""
        shutil.rmtree(self._run / PINNED, ignore_errors=True)
        steps = {int(match[1]) for name in names if (match := re.match(rf"{CHECKPOINTS}/([0-9]+)/", name))}
        self._remote = {step: self._read_digest(step) for step in complete_steps(names)}
        damaged = {step for step in steps if f"{CHECKPOINTS}/{step}/{MANIFEST}{DAMAGED}" in names}
        for step in steps - self._remote.keys() - damaged:
            self._store.delete(name for name in names if name.startswith(f"{CHECKPOINTS}/{step}/"))

    def prepare_newest(self) -> None:
        """Make the newest intact checkpoint available locally. Raises StorageError if there are only damaged ones."""
        pending: list[Callable[[], object]] = []
        steps = sorted({*self._remote, *local_steps(self._folder)}, reverse=True)
        for step in steps:
            if self._is_intact(step, pending) or self._download(step, pending):
                # Only now: without an intact checkpoint, the cause may be elsewhere, and all stay in place.
                for action in pending:
                    action()
                return
        if steps:
            reason = f"none of the run's {len(steps)} checkpoints is intact, neither there nor in {self._folder}"
            raise StorageError("resume", self._store.url, reason)

    def upload(self, *, before_commit: Callable[[], None], is_final: bool = False) -> None:
        """Upload the checkpoints that belong into the store, the newest first, and delete those that no longer do.

        `before_commit` is called before each manifest is written. `is_final` includes the newest checkpoint, whatever
        its step.
        """
        while (step := self._next_upload(is_final)) is not None:
            self._upload(step, before_commit)
            for other in {*self._remote} - self._retention.select(self._remote, self._metrics()):
                self._delete(other)

    def _next_upload(self, is_final: bool) -> int | None:
        local = local_steps(self._folder)
        eligible = {step for step in local if self._retention.is_persistent(step)}
        eligible |= {max(local)} if is_final and local else set()
        selected = self._retention.select({*self._remote, *eligible}, self._metrics()) & eligible
        for step in sorted(selected, reverse=True):
            # A checkpoint that the run deletes at this moment has no digest.
            digest = _digest(self._folder / str(step))
            if digest is not None and digest != self._remote.get(step) and digest not in self._skipped:
                return step
        return None

    def _metrics(self) -> dict[int, float]:
        return dict(zip(*series(self._run / METRICS, self._retention.best_metric), strict=True))

    def _upload(self, step: int, before_commit: Callable[[], None]) -> None:
        pinned, target = self._run / PINNED / str(step), f"{CHECKPOINTS}/{step}"
        try:
            digest = _digest(self._folder / str(step))
            if (manifest := _pin(self._folder / str(step), pinned)) is None:
                self._skipped.add(digest or "")
                return
            if step in self._remote:
                self._delete(step)
            self._store.map(lambda name: self._store.upload(pinned / name, f"{target}/{name}"), manifest.files)
            sizes = {name: item.size for name, item in self._store.find(target).items()}
            for name, entry in manifest.files.items():
                if sizes.get(f"{target}/{name}") != entry.size:
                    raise StorageError("write", f"{self._store.url}/{target}/{name}", "its size differs from the file")
            before_commit()
            self._store.upload(pinned / MANIFEST, f"{target}/{MANIFEST}")
            self._remote[step] = manifest.digest
            log.info("uploaded the checkpoint of step %d to %s", step, self._store.url)
        finally:
            shutil.rmtree(self._run / PINNED, ignore_errors=True)

    def _delete(self, step: int) -> None:
        """Delete a checkpoint of the store, its manifest first."""
        folder = f"{CHECKPOINTS}/{step}"
        self._store.delete([f"{folder}/{MANIFEST}"])
        self._remote.pop(step, None)
        self._store.delete(self._store.find(folder))

    def _read_digest(self, step: int) -> str:
        try:
            return parse_manifest(self._store.read(f"{CHECKPOINTS}/{step}/{MANIFEST}")).digest
        except (DamagedCheckpointError, FileNotFoundError, ValueError):
            return ""

    def _is_intact(self, step: int, pending: list[Callable[[], object]]) -> bool:
        """Whether the local checkpoint of a step exists and is intact."""
        path = self._folder / str(step)
        if not path.is_dir():
            return False
        if (damage := verify_files(path)) is None:
            return True
        log.warning("checkpoint %s is damaged: %s", path, damage)
        pending.append(lambda: path.rename(path.with_name(f"{step}.unreadable-{secrets.token_hex(4)}")))
        return False

    def _download(self, step: int, pending: list[Callable[[], object]]) -> bool:
        """Copy a checkpoint of the store next to its final name, and verify it; False if it is damaged or missing."""
        if step not in self._remote:
            return False
        source, partial = f"{CHECKPOINTS}/{step}", self._folder / f"{step}{PARTIAL}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            self._store.download(f"{source}/{MANIFEST}", partial / MANIFEST)
            names = parse_manifest((partial / MANIFEST).read_bytes()).files
            self._store.map(lambda name: self._download_file(f"{source}/{name}", partial / name), names)
            if (damage := verify_files(partial)) is not None:
                raise damage
        except (DamagedCheckpointError, FileNotFoundError) as error:
            log.warning("checkpoint %s/%s is damaged: %s", self._store.url, source, error)
            shutil.rmtree(partial, ignore_errors=True)
            pending.append(lambda: self._set_aside(step))
            return False
        pending.append(lambda: partial.rename(self._folder / str(step)))
        log.info("copied the checkpoint of step %d from %s", step, self._store.url)
        return True

    def _download_file(self, name: str, path: Path) -> None:
        try:
            self._store.download(name, path)
        except FileNotFoundError:
            raise DamagedCheckpointError(name.split("/", 2)[2], "is missing") from None

    def _set_aside(self, step: int) -> None:
        """Rename the manifest of a damaged checkpoint in the store, without which it does not count."""
        name = f"{CHECKPOINTS}/{step}/{MANIFEST}"
        with contextlib.suppress(FileNotFoundError):
            self._store.write(f"{name}{DAMAGED}", self._store.read(name))
        self._store.delete([name])
        self._remote.pop(step, None)


def local_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in a local folder."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("[0-9]+", name))


def _pin(checkpoint: Path, pinned: Path) -> Manifest | None:
    """Hard-link the files of a checkpoint; None if files are missing, because the run is deleting it."""
    try:
        manifest = read_manifest(checkpoint)
        for name in () if manifest is None else (*manifest.files, MANIFEST):
            (pinned / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(checkpoint / name, pinned / name)
            except PermissionError:  # a file system without hard links
                shutil.copyfile(checkpoint / name, pinned / name)
        return manifest
    except (FileNotFoundError, DamagedCheckpointError):
        return None


def _digest(checkpoint: Path) -> str | None:
    try:
        manifest = read_manifest(checkpoint)
    except (DamagedCheckpointError, ValueError):
        return None
    return None if manifest is None else manifest.digest
