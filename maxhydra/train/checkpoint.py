"""Checkpoints on Orbax: asynchronous, atomic, recoverable after a crash, rejected if they hold a different model.

A checkpoint of step k is the folder checkpoints/k with three items: `params`, `rest` (step, optimizer, key, guard, amax
history) and `data` (the loader's position, JSON), and manifest.json with the digests of all files. It is renamed into
place once complete, so a killed save leaves nothing behind that could be mistaken for a checkpoint.
"""

import asyncio
import dataclasses
import errno
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.checkpoint import Checkpoint, SaveMode
from maxhydra.config.schema.metrics import is_maximized
from maxhydra.convert.orbax_io import (
    checkpoint_steps,
    find_checkpoint,
    one_line_message,
    read_errors_as_config_errors,
    read_trees,
    require_intact,
    stored_shapes,
)
from maxhydra.record.checkpoint_manifest import (
    CHECKPOINT_FORMAT,
    DamagedCheckpointError,
    EarlyHasher,
    write_manifest,
)
from maxhydra.record.checkpoint_tiers import best_steps
from maxhydra.train.local_tier import LocalTier, NoLocalTier
from maxhydra.train.loss import Tree
from maxhydra.train.state import DilocoState, TrainState

FULL_STATE = "checkpoint.load_full_state"
# Names of the arrays that each DiLoCo replica has for itself; their first dimension is the replica.
DILOCO_REPLICAS = "opt_state/replicas/"
Evaluations = Mapping[int, Mapping[str, float]]
NO_EVALUATIONS: Evaluations = {}
NO_LOCAL_TIER = NoLocalTier()
# Size at which a data file is written and a new one started. Orbax's 2 GiB would buffer smaller items in memory, and
# write and hash them only after everything is compressed.
DATA_FILE_BYTES = 64 * 2**20
# Moves the batches of a task to a data position.
Seek = Callable[[dict[str, Any]], None]
log = logging.getLogger("maxhydra")


class SaveFailed(Exception):
    """A checkpoint could not be written; the message names the last one that is intact."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored state, its data position, and the checkpoint's folder.

    `state.frozen` is still abstract, because a checkpoint does not hold it.
    """

    state: TrainState
    data: dict[str, Any]
    source: Path


class Checkpointer(Protocol):
    """Saves the states of one run."""

    def save(self, step: int, state: TrainState, data: dict[str, Any], metrics: Mapping[str, float]) -> None: ...

    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        ...

    def wait(self) -> None:
        """Wait for the save in flight; raises SaveFailed if it failed."""
        ...

    def close(self) -> None: ...


class NoCheckpointer:
    """checkpoint.mode=off: saves nothing."""

    def save(self, step: int, state: TrainState, data: dict[str, Any], metrics: Mapping[str, float]) -> None:
        return

    def is_saving(self) -> bool:
        return False

    def wait(self) -> None:
        return

    def close(self) -> None:
        return


@dataclasses.dataclass(frozen=True)
class _BestEvaluated:
    """Orbax policy that preserves the `count` checkpoints with the best `metric`, the newest of equal ones.

    Evaluations come from metrics.jsonl: one that a signal interrupted is repeated after its checkpoint was saved.
    """

    evaluations: Evaluations
    metric: str
    count: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        metrics = {info.step: self.evaluations.get(info.step) or info.metrics or {} for info in checkpoints}
        ranked = {step: values[self.metric] for step, values in metrics.items() if self.metric in values}
        best = best_steps(ranked, self.count, largest=is_maximized(self.metric))
        return [info.step in best for info in checkpoints]


class VerifiedTemporaryPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder of a save, which gets its manifest between the last write and the final rename.

    Orbax creates and finalizes the folder of a step on the first process. Data files are hashed while others are still
    being written, the remaining files after all processes have written theirs, both in the background: hashing does not
    delay the training loop.
    """

    _hasher: EarlyHasher | None = None

    async def create(self) -> Any:
        folder = await super().create()
        if not self._is_item:
            self._hasher = EarlyHasher(Path(folder), _is_complete_data)
        return folder

    @property
    def _is_item(self) -> bool:
        """Whether this is the folder of an item within a step: its files are hashed with those of the step."""
        return ocp.path.atomicity.TMP_DIR_SUFFIX in Path(self.get_final()).parent.name

    async def finalize(self) -> None:
        if self._is_item:
            await super().finalize()
            return
        final, temporary = Path(self.get_final()), Path(self.get())
        # Orbax writes two more files and renames the folder: to another temporary name, so that they are hashed too.
        complete = temporary.with_name(f"{temporary.name}-complete")
        self._final_path = type(self.get())(complete)
        await super().finalize()
        await asyncio.to_thread(write_manifest, complete, self._hasher)
        complete.rename(final)
        self._final_path = type(self.get())(final)


def _is_complete_data(name: str) -> bool:
    """Whether a file holds array data: tensorstore gives such files a random name once they are written, for good."""
    return re.fullmatch(r".*/ocdbt\.process_[0-9]+/d/[0-9a-f]{32}", name) is not None


class OrbaxCheckpointer:
    """Writes to a folder through an Orbax manager, which also deletes old checkpoints."""

    def __init__(self, folder: Path, config: Checkpoint, evaluations: Evaluations):
        keep: list[policies.PreservationPolicy] = [policies.LatestN(config.keep)]
        if config.keep_best:
            keep.append(_BestEvaluated(evaluations, config.best_metric, config.keep_best))
        self._best_metric = config.best_metric
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(
                enable_async_checkpointing=config.mode is SaveMode.asynchronous,
                preservation_policy=policies.AnyPreservationPolicy(keep),
                cleanup_tmp_directories=True,
                save_root_metadata=False,
                temporary_path_class=VerifiedTemporaryPath,
            ),
        )

    def save(self, step: int, state: TrainState, data: dict[str, Any], metrics: Mapping[str, float]) -> None:
        best = {self._best_metric: metrics[self._best_metric]} if self._best_metric in metrics else None
        items = ocp.args.Composite(
            **{name: _save_arrays(tree) for name, tree in saved_trees(state).items()},
            data=ocp.args.JsonSave(data),
        )
        try:
            self._require_disk_space(state)
            version = {"format": CHECKPOINT_FORMAT}
            self._manager.save(step, args=items, metrics=best, force=True, custom_metadata=version)
        except Exception as error:
            raise self._failure(error) from error

    def _require_disk_space(self, state: TrainState) -> None:
        """Fail before writing if the disk cannot hold the checkpoint, instead of filling it and failing half-way."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(saved_trees(state))) // jax.process_count()
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"needs {needed / 2**20:.1f} MiB, but only {free / 2**20:.1f} MiB are free")

    def is_saving(self) -> bool:
        return bool(self._manager.is_saving_in_progress())

    def wait(self) -> None:
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _failure(self, error: Exception) -> SaveFailed:
        """Delete the partial save, which frees space on a full disk, and report the last intact checkpoint."""
        for leftover in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)
        steps = checkpoint_steps(self._folder)
        last = f"the checkpoint of step {steps[-1]} is intact" if steps else "no earlier checkpoint exists"
        return SaveFailed(f"could not write a checkpoint to {self._folder}: {one_line_message(error)}; {last}")


def _save_arrays(tree: Tree) -> ocp.args.PyTreeSave:
    return ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=DATA_FILE_BYTES)


def open_checkpointer(folder: Path, config: Checkpoint, evaluations: Evaluations = NO_EVALUATIONS) -> Checkpointer:
    """The checkpointer of a run; `evaluations` are its metrics by step, to which the loop adds."""
    return NoCheckpointer() if config.mode is SaveMode.off else OrbaxCheckpointer(folder, config, evaluations)


def restore(
    folder: Path, config: Checkpoint, abstract: TrainState, seek: Seek, local: LocalTier = NO_LOCAL_TIER
) -> Restored | None:
    """Restore the run's newest checkpoint, else checkpoint.load_full_state; None if there is neither.

    `seek` moves the batches to the checkpoint's data position. A damaged or unreadable checkpoint of the run is
    renamed, and the previous one is used. If none can be read, the cause may be elsewhere (a disk that is offline, too
    little memory), and all stay in place: a folder without checkpoints would be taken for a new run.
    """
    unreadable: list[Path] = []
    local_steps, steps = local.steps(), _list_steps(folder)
    for step in sorted({*local_steps, *steps}, reverse=True):
        restored = _read_local(step, local, abstract, seek) if step in local_steps else None
        if restored is None and step in steps:
            restored = _read_or_report(folder / str(step), config, abstract, seek, unreadable)
        if restored is not None:
            if jax.process_index() == 0:
                for other in unreadable:
                    _mark_unreadable(other)
            return restored
    if unreadable:
        reason = f"none of the run's {len(unreadable)} checkpoints can be read"
        raise ConfigError(Problem("run.name", reason, hint=f"check {folder}, or choose another run.name"))
    if config.load_full_state is not None:
        path = find_checkpoint(FULL_STATE, config.load_full_state)
        with read_errors_as_config_errors(FULL_STATE, path):
            return read_state(path, abstract, seek, single_replica=config.single_replica)
    return None


def _read_or_report(
    path: Path, config: Checkpoint, abstract: TrainState, seek: Seek, unreadable: list[Path]
) -> Restored | None:
    """Read a checkpoint of the run; one that cannot be read is logged and added to `unreadable`."""
    try:
        return read_state(path, abstract, seek, single_replica=config.single_replica)
    except ConfigError:
        raise
    except Exception as error:
        log.warning("cannot read checkpoint %s (%s)", path, one_line_message(error))
        unreadable.append(path)
        return None


def _read_local(step: int, local: LocalTier, abstract: TrainState, seek: Seek) -> Restored | None:
    """Read a local checkpoint; None if it cannot be used, which is logged."""
    try:
        trees, data, source = local.read(step, saved_trees(abstract))
        return _restored(trees, data, abstract, seek, source)
    except (DamagedCheckpointError, ValueError) as error:
        log.warning("%s", one_line_message(error))
        return None


def _list_steps(folder: Path) -> list[int]:
    """Steps of the run's checkpoints; a folder without any, and entries that are not checkpoints, are reported."""
    steps = checkpoint_steps(folder)
    if folder.is_dir() and not steps:
        log.warning("%s contains no checkpoint", folder)
    expected = {str(step) for step in steps}
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name not in expected and not re.search(r"\.unreadable|\.orbax-checkpoint-tmp", entry.name):
            log.warning("%s is not a checkpoint and is ignored", entry)
    return steps


def _mark_unreadable(path: Path) -> None:
    """Rename a checkpoint to STEP.unreadable, numbered if one of the same step was renamed before."""
    names = (f"{path.name}.unreadable{more}" for more in chain([""], (f"-{number}" for number in count(2))))
    new_name = next(name for name in names if not path.with_name(name).exists())
    path.rename(path.with_name(new_name))
    log.warning("renamed unreadable checkpoint %s to %s", path, new_name)


def read_state(
    path: Path, abstract: TrainState, seek: Seek = lambda position: None, *, single_replica: bool = True
) -> Restored:
    """Verify a checkpoint and read it onto the shapes and shardings of `abstract`, whatever mesh wrote it."""
    require_intact(path)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        data = reader.restore(path, args=ocp.args.Composite(data=ocp.args.JsonRestore())).data
    try:
        trees = read_trees(path, saved_trees(abstract), single_replica=single_replica)
    except ConfigError as error:
        raise _other_replicas(path, abstract) or error from None
    return _restored(trees, data, abstract, seek, path)


def _restored(
    trees: Mapping[str, Tree], data: dict[str, Any], abstract: TrainState, seek: Seek, source: Path
) -> Restored:
    try:
        seek(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"data/metadata does not hold a data position of this task: {data!r}") from error
    saved = TrainState(params=trees["params"], frozen=abstract.frozen, **{"history": {}, **trees["rest"]})
    return Restored(state=saved.exchange_average(), data=data, source=source)


def _other_replicas(path: Path, abstract: TrainState) -> ConfigError | None:
    """The error if a checkpoint has another number of DiLoCo replicas than the run; None if it has not."""
    shapes = stored_shapes(path, "rest")
    stored = next((shape[0] for name, shape in shapes.items() if name.startswith(DILOCO_REPLICAS)), 1)
    state = abstract.opt_state
    replicas = jax.tree.leaves(state.replicas)[0].shape[0] if isinstance(state, DilocoState) else 1
    if stored == replicas:
        return None
    reason = f"the checkpoint has {stored} DiLoCo replica{'s' * (stored > 1)}, this run has {replicas}"
    accepted = f"mesh.replica x mesh.dcn.replica = {stored}"
    hint = f"or start another run from the shared weights: run.name=NAME checkpoint.load_parameters={path}"
    return ConfigError(Problem("mesh.replica", reason, value=replicas, accepted=accepted, hint=hint))


def saved_trees(state: TrainState) -> dict[str, Tree]:
    """The items of a checkpoint that hold arrays.

    With an average of the weights, it is in `params`, where all readers of weights find it, and the trained weights are
    in its place in `rest`.
    """
    saved = state.exchange_average()
    return {"params": saved.params, "rest": _rest(saved)}


def _rest(state: TrainState) -> dict[str, Tree]:
    rest = {"step": state.step, "opt_state": state.opt_state, "key": state.key, "guard": state.guard}
    return {**rest, "history": state.history} if state.history else rest
