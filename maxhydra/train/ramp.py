"""The step for a batch that grows: compiled once for each size, the next while this one is in use."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from maxhydra.train.state import TrainState
from maxhydra.train.step import Batch, Metrics, StepFn, sequences_in


class RampedStep:
    """Runs the step that was compiled for a batch's size."""

    def __init__(
        self, compile_for: Callable[[Mapping[str, Any]], StepFn], sizes: Sequence[int], compiled: Mapping[int, StepFn]
    ):
        """`compile_for` compiles for batches like an example; `compiled` holds what is there already."""
        self._compile_for, self._sizes = compile_for, sorted(set(sizes))
        self._steps: dict[int, StepFn] = dict(compiled)
        self._under_way: dict[int, Future[StepFn]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compile")

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        size = sequences_in(batch)
        for wanted in self._sizes[self._sizes.index(size) :][:2]:
            if wanted not in self._steps and wanted not in self._under_way:
                example = {
                    name: jax.ShapeDtypeStruct((wanted, *array.shape[1:]), array.dtype, sharding=array.sharding)
                    for name, array in batch.items()
                }
                self._under_way[wanted] = self._worker.submit(self._compile_for, example)
        if size not in self._steps:
            self._steps[size] = self._under_way.pop(size).result()
        return self._steps[size](state, batch)
