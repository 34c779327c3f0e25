"""Sources of training batches: a data loader, or a task that generates batches with the current weights."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.run import Train
from maxhydra.data import BatchSpec, Loader, RowSpec
from maxhydra.data.pipeline import count_training_rows
from maxhydra.sharding import Sharder, build_mesh, split_devices
from maxhydra.train.loss import Batch
from maxhydra.train.state import TrainState

log = logging.getLogger("maxhydra")


class BatchSource(Protocol):
    """An endless source of batches of equal shapes (except for a batch-size ramp), with a resumable position."""

    def peek(self) -> Mapping[str, Any]:
        """Arrays or shapes like those of the next batch, for compiling the step."""
        ...

    def take(self, step: int, state: TrainState) -> Batch:
        """The batch of a step. `state` is the one that is trained on it; it is donated after, so only read it now."""
        ...

    def observe(self, step: int, row_values: Mapping[str, jax.Array]) -> None:
        """Take values of each row of a step's batch, right after the step was dispatched, if its loss has any."""
        ...

    def state(self) -> dict[str, Any]:
        """The position after the last batch taken, as JSON. A collective call: all processes make it together."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics to log about the batches taken."""
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class LoaderBatches:
    """Batches of a data loader, which do not depend on the weights."""

    loader: Loader[Batch]

    def peek(self) -> Mapping[str, Any]:
        return self.loader.peek()

    def take(self, step: int, state: TrainState) -> Batch:
        return next(self.loader)

    def observe(self, step: int, row_values: Mapping[str, jax.Array]) -> None:
        """Rows of a file have no record that values could be added to."""

    def state(self) -> dict[str, Any]:
        return self.loader.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.loader.restore(state)

    def metrics(self) -> dict[str, float]:
        return self.loader.metrics()

    def close(self) -> None:
        self.loader.close()


@dataclasses.dataclass(frozen=True)
class DerivedBatches:
    """Base of a source whose batches are those of another one with further columns; it has the same positions."""

    source: BatchSource

    def observe(self, step: int, row_values: Mapping[str, jax.Array]) -> None:
        self.source.observe(step, row_values)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state)

    def metrics(self) -> dict[str, float]:
        return self.source.metrics()

    def close(self) -> None:
        self.source.close()


def plan_batches(config: Config, sharder: Sharder) -> BatchSpec:
    """The global batch: per_device_batch_size x devices x grad_accum, checked against the mesh."""
    train = config.train
    shards = sharder.num_shards("act_length")
    if train.seq_len % shards:
        raise ConfigError(
            Problem(
                "train.seq_len",
                f"is not divisible by its {shards} shards (mesh.sequence={shards})",
                value=train.seq_len,
                accepted=f"a multiple of {shards}",
                hint=f"the next one is {math.ceil(train.seq_len / shards) * shards}",
            )
        )
    return BatchSpec(
        rows=RowSpec.of(config),
        batch=_micro_batch(train.per_device_batch_size, "train.per_device_batch_size", sharder) * train.grad_accum,
        sharding=sharder.sharding(("act_batch", "act_length")),
        ramp=tuple(_ramp(train, sharder)),
    )


def resolve_epochs(config: Config) -> Config:
    """Replace train.steps by the number of steps in train.epochs; raises ConfigError if unknown."""
    epochs = config.train.epochs
    if epochs is None:
        return config
    path, share = config.task.separate_devices
    training, _ = split_devices(jax.devices(), share, path=path)
    spec = plan_batches(config, Sharder.from_config(config.mesh, build_mesh(config.mesh, training)))
    rows, sequences, steps = count_training_rows(config.data, spec.rows), 0, 0
    while sequences < round(epochs * rows):
        remaining, size = round(epochs * rows) - sequences, spec.batch_at(sequences)
        # Beyond the ramp all batches have one size.
        count = math.ceil(remaining / size) if size == spec.batch else 1
        sequences, steps = sequences + count * size, steps + count
    if problems := list(config.optimizer.schedule.check_length(steps)):
        hint = f"train.epochs={epochs:g} are {steps} steps"
        raise ConfigError([dataclasses.replace(problem, hint=hint) for problem in problems])
    log.info("train.epochs=%g: %d steps over %s sequences", epochs, steps, f"{rows:,}")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def _micro_batch(per_device: float, path: str, sharder: Sharder) -> int:
    """Sequences of one forward pass over all devices."""
    devices, shards = sharder.mesh.size, sharder.num_shards("act_batch")
    batch = per_device * devices
    if batch != int(batch) or int(batch) % shards:
        reason = f"makes {batch:g} sequences on {devices} devices, which do not divide into the mesh's {shards} shards"
        accepted = f"a multiple of {shards}/{devices}" if shards != devices else "a whole number"
        raise ConfigError(Problem(path, reason, value=per_device, accepted=accepted))
    if sharder.stages > 1:
        sharder.pipeline_schedule(int(batch))
    return int(batch)


def _ramp(train: Train, sharder: Sharder) -> Iterator[tuple[int, int]]:
    """Batch sizes before the full one as (sequence count at which it ends, size); each lasts equally long."""
    ramp = train.ramp
    if ramp.start is None:
        return
    increments = math.ceil((train.per_device_batch_size - ramp.start) / ramp.increment)
    for number in range(increments):
        path = "train.ramp.increment" if number else "train.ramp.start"
        size = _micro_batch(ramp.start + number * ramp.increment, path, sharder)
        yield math.ceil(ramp.sequences * (number + 1) / increments), size * train.grad_accum
