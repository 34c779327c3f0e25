"""Where the batches of a run come from: a loader of data, or what a task makes of it with the weights at hand."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.run import Train
from maxhydra.data import BatchSpec, Loader, RowSpec
from maxhydra.sharding import Sharder
from maxhydra.train.state import TrainState
from maxhydra.train.step import Batch


class BatchSource(Protocol):
    """Batches without end, all of the same shapes (but for a ramp), and the position to go on from."""

    def peek(self) -> Mapping[str, Any]:
        """Arrays or shapes like those of the next batch, from which the step is compiled."""
        ...

    def take(self, state: TrainState) -> Batch:
        """The next batch. The state is the one that it will be trained on; it must not be kept, only read now."""
        ...

    def state(self) -> dict[str, Any]:
        """The position after the last batch taken, as JSON. All processes ask at once."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        ...

    def metrics(self) -> dict[str, float]:
        """What is worth logging of the batches taken."""
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class LoaderBatches:
    """Batches as they are in the data, whatever the weights."""

    loader: Loader[Batch]

    def peek(self) -> Mapping[str, Any]:
        return self.loader.peek()

    def take(self, state: TrainState) -> Batch:
        return next(self.loader)

    def state(self) -> dict[str, Any]:
        return self.loader.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.loader.restore(state)

    def metrics(self) -> dict[str, float]:
        return self.loader.metrics()

    def close(self) -> None:
        self.loader.close()


def plan_batches(config: Config, sharder: Sharder) -> BatchSpec:
    """The global batch: per_device_batch_size x devices x grad_accum, checked against how the mesh splits it."""
    train = config.train
    length_ways = sharder.ways("act_length")
    if train.seq_len % length_ways:
        raise ConfigError(
            Problem(
                "train.seq_len",
                f"is split {length_ways} ways by mesh.sequence={length_ways}",
                value=train.seq_len,
                accepted=f"a multiple of {length_ways}",
                hint=f"{math.ceil(train.seq_len / length_ways) * length_ways} is the next",
            )
        )
    return BatchSpec(
        rows=RowSpec(seq_len=train.seq_len, vocab_size=config.model.vocab_size, seed=config.run.seed),
        batch=_micro_batch(train.per_device_batch_size, "train.per_device_batch_size", sharder) * train.grad_accum,
        sharding=sharder.sharding(("act_batch", "act_length")),
        ramp=tuple(_ramp(train, sharder)),
    )


def _micro_batch(per_device: float, path: str, sharder: Sharder) -> int:
    """Sequences of one forward pass over all devices."""
    devices, ways = sharder.mesh.size, sharder.ways("act_batch")
    batch = per_device * devices
    if batch != int(batch) or int(batch) % ways:
        reason = f"makes {batch:g} sequences on {devices} devices, which the mesh splits {ways} ways"
        accepted = f"a multiple of {ways}/{devices}" if ways != devices else "a whole number"
        raise ConfigError(Problem(path, reason, value=per_device, accepted=accepted))
    return int(batch)


def _ramp(train: Train, sharder: Sharder) -> Iterator[tuple[int, int]]:
    """Sizes before the full one, each with the sequences before which it holds: all sizes last equally long."""
    ramp = train.ramp
    if ramp.start is None:
        return
    growths = math.ceil((train.per_device_batch_size - ramp.start) / ramp.increment)
    for number in range(growths):
        path = "train.ramp.increment" if number else "train.ramp.start"
        size = _micro_batch(ramp.start + number * ramp.increment, path, sharder)
        yield math.ceil(ramp.sequences * (number + 1) / growths), size * train.grad_accum
