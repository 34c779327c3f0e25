"""Where the batches of a run come from: a loader of data, or what a task makes of it with the weights at hand."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from maxhydra.data import Loader
from maxhydra.train.state import TrainState
from maxhydra.train.step import Batch


class Batches(Protocol):
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
class LoadedBatches:
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
