"""Compiled training steps: headroom for small arrays, and a step whose batch size ramps up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.sharding import Sharder
from maxhydra.train.state import TrainState
from maxhydra.train.step import Batch, Metrics, StepFn, sequences_in

BYTES = 64 * 2**20


@contextmanager
def reserve_gpu_headroom(sharder: Sharder) -> Iterator[None]:
    """On GPUs, leave a gap of a few megabytes before the large arrays that are made inside.

    The allocator there takes the smallest free piece that is large enough. Batches and metrics come while a step runs,
    and without such a gap get a place behind its temporaries. What is free is then split there for good, and a step
    that needs most of it in one piece fits a few times, until something small lies in the other part too.
    """
    has_pool = sharder.platform == "gpu" and isinstance(sharder.mesh, jax.sharding.Mesh)
    devices = sharder.mesh.local_devices if has_pool else ()
    gaps = [jnp.zeros(BYTES, jnp.uint8, device=device) for device in devices]
    yield
    for gap in gaps:
        gap.delete()


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
