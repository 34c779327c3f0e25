"""Schedules of alpha, beta and temperature over a run, passed to the loss as columns of its batches."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.distill import Course, DistillTask
from maxhydra.data import BatchSpec
from maxhydra.train import LoaderBatches, TrainState
from maxhydra.train.loss import Batch
from maxhydra.train.step import sequences_in


def values_at(task: DistillTask, step: jax.Array, steps: int) -> dict[str, jax.Array]:
    """Alpha, temperature and (if used) beta at a step of a run of `steps` steps."""
    progress = jnp.clip(step / max(steps - 1, 1), 0, 1)
    if task.course is Course.cosine:
        progress = (1 - jnp.cos(jnp.pi * progress)) / 2
    schedules = {
        "alpha": (task.alpha, task.alpha_end),
        "beta": (task.beta, task.beta_end),
        "temperature": (task.temperature, task.temperature_end),
    }
    return {
        name: start + progress * ((start if end is None else end) - start)
        for name, (start, end) in schedules.items()
        if start is not None
    }


@dataclasses.dataclass(frozen=True)
class ScheduledBatches(LoaderBatches):
    """Loader batches with a column [B] for each scheduled value, computed on the device from the state's step."""

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
