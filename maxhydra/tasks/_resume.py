"""Checks before a training session: the run resumes with the config and the inputs that it was started with.

Nothing is written before these checks pass, so a rejected command leaves the run as it was.
"""

import dataclasses
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.resume import (
    ConfigChange,
    changed_problem,
    config_changes,
    fixed_problems,
    is_accepted,
    unknown_keys,
)
from maxhydra.convert.adapter_lineage import run_folder, weights_record
from maxhydra.convert.compatibility import changes_from_run
from maxhydra.convert.orbax_io import checkpoint_steps
from maxhydra.record import RunDirectory
from maxhydra.record.local_checkpoints import list_parts, local_run_folder
from maxhydra.record.redact import HIDDEN
from maxhydra.sharding import num_separate_devices
from maxhydra.train.run_inputs import (
    FULL_STATE,
    PARAMETERS,
    InputChange,
    Records,
    compare_inputs,
    pin_weights,
    record_inputs,
)

# Sequences per optimizer step over all devices, as run.json stores it.
BATCH = "sequences_per_step"
# Keys that decide which files a section reads: if one of them has changed, other files do not count as a second change.
FILE_CHOICES = ("source", "name", "eval_name", "data_dir", "kind")
MAX_LISTED = 12
# Log-probs of a reference, which dpo computes once (align/reference.py).
REFERENCE_CACHE = "reference"
log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class Session:
    """The config of a session, with pinned weights, and the facts that it adds to run.json."""

    config: Config
    facts: dict[str, Any]


def prepare_session(config: Config, run: RunDirectory, *, devices: int, processes: int) -> Session:
    """Record the inputs of a new run; compare config and inputs of a run that resumes. Raises ConfigError."""
    if problems := list(unknown_keys(config.run.accept_changed_config, config)):
        raise ConfigError(problems)
    path, share = config.task.separate_devices
    training = devices - num_separate_devices(devices, share, path=path)
    if config.train.elastic and run.exists():
        config = _adjust_batch(config, run.read().get(BATCH), training)
    per_device = config.train.per_device_batch_size * config.train.grad_accum
    batch, accepted = per_device * training, list[str]()
    if _has_progress(config, run, processes):
        # Earlier versions recorded the batch as if all devices trained.
        accepted, records = _compare(config, run, batch, earlier=per_device * devices)
    else:
        _check_loaded_model(config)
        records = record_inputs(config)
    records = _agree_on_steps(records, processes)
    facts: dict[str, Any] = {"inputs": records, BATCH: batch}
    if accepted:
        before = run.read()
        number = len(before.get("sessions", [])) + 1
        entries = [{"session": number, "change": change} for change in accepted]
        facts["accepted_changes"] = [*before.get("accepted_changes", []), *entries]
    return Session(pin_weights(config, records), facts)


def _adjust_batch(config: Config, batch: float | None, devices: int) -> Config:
    """Make `batch` sequences per step on this number of devices, with at most the configured number on each at a time.

    A number that the mesh cannot divide is rejected where the batches are planned.
    """
    train = config.train
    if batch is None or batch == train.per_device_batch_size * devices * train.grad_accum:
        return config
    grad_accum = math.ceil(batch / (train.per_device_batch_size * devices))
    per_device = batch / (grad_accum * devices)
    text = "train.elastic: this session has train.grad_accum=%d train.per_device_batch_size=%g on %d devices"
    log.info(text, grad_accum, per_device, devices)
    return dataclasses.replace(
        config, train=dataclasses.replace(train, grad_accum=grad_accum, per_device_batch_size=per_device)
    )


def _has_progress(config: Config, run: RunDirectory, processes: int) -> bool:
    """Whether a session would continue earlier results; a run without any starts over."""
    results = checkpoint_steps(run.checkpoints) or any((run.path / REFERENCE_CACHE).glob("*.logprobs"))
    has_results = run.exists() and bool(results)
    if config.checkpoint.local_every is None:
        return has_results
    # Local checkpoints may be on another host only, and all processes must decide alike.
    found = list_parts(local_run_folder(config.checkpoint.local_folder, run.path)) if run.exists() else ()
    has_local = any(part.created == run.read()["created"] for _, part in found)
    if processes == 1:
        return has_results or has_local
    return bool(multihost_utils.process_allgather(np.bool_(has_results or has_local)).any())


def _compare(config: Config, run: RunDirectory, batch: float, *, earlier: float) -> tuple[list[str], Records]:
    """Compare a session with the run's last one; returns the accepted changes and the records of the inputs."""
    before = run.read()
    changes = config_changes(run.config_path.read_text(encoding="utf-8"), config, hidden=HIDDEN)
    accepted_keys = config.run.accept_changed_config
    problems = list(fixed_problems(changes, accepted_keys))
    binding = [change for change in changes if not (change.is_free or change.is_input)]
    if (size := _batch_change(before, batch, earlier)) is not None:
        binding.append(size)
        problems += [] if is_accepted(size.key, accepted_keys) else [_batch_problem(size)]
    input_changes: list[InputChange] = []
    if "inputs" in before:
        input_changes, records = compare_inputs(config, before["inputs"])
    else:
        # An earlier version started the run and recorded nothing to compare with.
        records = record_inputs(config)
    input_changes = [change for change in input_changes if not _is_consequence(change, binding)]
    kinds = config.run.accept_changed_inputs
    problems += [change.problem() for change in input_changes if change.kind not in kinds]
    if problems:
        raise ConfigError(problems)
    _log_free_changes([change for change in changes if change.is_free and not change.key.startswith("run.")])
    accepted = [str(change) for change in (*binding, *input_changes)]
    for change in accepted:
        log.warning("accepted: %s", change)
    if run.writes and any(change.kind in ("base", "reference") for change in input_changes):
        shutil.rmtree(run.path / REFERENCE_CACHE, ignore_errors=True)
    return accepted, records


def _log_free_changes(changes: list[ConfigChange]) -> None:
    if changes:
        more = f" and {len(changes) - MAX_LISTED} more" if len(changes) > MAX_LISTED else ""
        log.info("changed since the last session: %s%s", ", ".join(map(str, changes[:MAX_LISTED])), more)


def _batch_change(before: Mapping[str, Any], batch: float, earlier: float) -> ConfigChange | None:
    """The change of the batch over all devices, which several keys and the number of devices decide."""
    known = before.get(BATCH, batch)
    return None if known in (batch, earlier) else ConfigChange("train.per_device_batch_size", known, batch)


def _batch_problem(change: ConfigChange) -> Problem:
    reason = (
        f"makes {show(change.now)} sequences per step (x devices x train.grad_accum), but the run has used "
        f"{show(change.before)}"
    )
    hint = (
        "adjust it, train.grad_accum or both (train.elastic=true), choose another run.name, or accept the change with "
    )
    return Problem(change.key, reason, hint=f"{hint}run.accept_changed_config=[{change.key}]")


def _is_consequence(change: InputChange, binding: list[ConfigChange]) -> bool:
    """Whether a changed input follows from a changed key, which is reported or accepted itself."""
    section = change.key.rpartition(".")[0]
    for key in (changed.key for changed in binding):
        owner, _, name = key.rpartition(".")
        if change.key == key or change.key.startswith(f"{key}.") or (owner == section and name in FILE_CHOICES):
            return True
    return False


def _check_loaded_model(config: Config) -> None:
    """Raise ConfigError if a new run loads the weights of a run whose model computes something else.

    Weights of the same shapes would load without an error and mean something different.
    """
    problems: list[Problem] = []
    for key, source in (
        (PARAMETERS, config.checkpoint.load_parameters),
        (FULL_STATE, config.checkpoint.load_full_state),
    ):
        run = None if source is None else run_folder(source)
        if run is not None:
            problems += _model_problems(config, key, run)
    if problems:
        raise ConfigError(problems)


def _model_problems(config: Config, key: str, run: Path) -> Iterator[Problem]:
    for change in changes_from_run(run, config.model):
        if not is_accepted(change.key, config.run.accept_changed_config):
            reason = f"is {show(change.before)} in the run of {key}={run}"
            problem = changed_problem(change)
            hint = f"use the value of that run, or accept the change with run.accept_changed_config=[{change.key}]"
            yield dataclasses.replace(problem, reason=reason, hint=hint)


def _agree_on_steps(records: Records, processes: int) -> Records:
    """Make all processes load the checkpoints that process 0 found, if a run saves new ones while they start."""
    if processes == 1:
        return records
    pinned = [(kind, key) for kind in sorted(records) for key in sorted(records[kind]) if "step" in records[kind][key]]
    steps = [records[kind][key]["step"] or 0 for kind, key in pinned]
    agreed = multihost_utils.broadcast_one_to_all(np.array(steps, np.int64))
    for (kind, key), step, other in zip(pinned, steps, agreed, strict=True):
        if step != other:
            path = Path(records[kind][key]["path"]).with_name(str(other))
            location = records[kind][key]["location"]
            records[kind][key] = {**weights_record(key, str(path)), "location": location}
    return records
