"""Values that change over a run, as columns of its batches: alpha, beta and temperature."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.distill import Course, DistillTask
from maxhydra.data import BatchSpec
from maxhydra.train import LoaderBatches, TrainState
from maxhydra.train.step import Batch, sequences_in


def values_at(task: DistillTask, step: jax.Array, steps: int) -> dict[str, jax.Array]:
    """What alpha, beta (where it is used) and temperature are after so many steps of a run."""
    way = jnp.clip(step / max(steps - 1, 1), 0, 1)
    if task.course is Course.cosine:
        way = (1 - jnp.cos(jnp.pi * way)) / 2
    courses = {
        "alpha": (task.alpha, task.alpha_end),
        "beta": (task.beta, task.beta_end),
        "temperature": (task.temperature, task.temperature_end),
    }
    return {
        name: start + way * ((start if end is None else end) - start)
        for name, (start, end) in courses.items()
        if start is not None
    }


@dataclasses.dataclass(frozen=True)
class ScheduledBatches(LoaderBatches):
    """Batches with a column [B] for each value. The state's step stays on the device: no step waits for it."""

    task: DistillTask
    spec: BatchSpec
    steps: int

    def peek(self) -> Mapping[str, Any]:
        batch = super().peek()
        return {**batch, **self._columns(jnp.zeros((), jnp.int32), sequences_in(batch))}

    def take(self, state: TrainState) -> Batch:
        batch = super().take(state)
        return {**batch, **self._columns(state.step, sequences_in(batch))}

    @cached_property
    def _columns(self) -> Any:
        def columns(step: jax.Array, rows: int) -> Batch:
            values = values_at(self.task, step, self.steps)
            return {name: jnp.full(rows, value, jnp.float32) for name, value in values.items()}

        return jax.jit(columns, static_argnums=1, out_shardings=self.spec.sharding_of(1))
