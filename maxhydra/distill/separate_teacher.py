"""A teacher on its own devices: its outputs become columns of the batches that the student is trained on.

The teacher's program is dispatched before the student's step, and the host waits for neither: while the student trains
on a batch, the teacher runs on the next one, unless the student has to sample it first.

B rows, S positions, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.run import Train
from maxhydra.data import BatchSpec
from maxhydra.distill.loss import IDS, LOGITS, feature_column
from maxhydra.distill.teacher import OnlineTeacher
from maxhydra.distill.text_alignment import LOGPROBS, teacher_columns
from maxhydra.sharding import Sharder
from maxhydra.train import Scorer, TrainState
from maxhydra.train.batches import DerivedBatches
from maxhydra.train.evaluate import map_microbatches
from maxhydra.train.loss import Batch, Tree

# (the teacher's weights, a batch) -> columns of its outputs.
Outputs = Callable[[Tree, Batch], Batch]


def logit_outputs(teacher: OnlineTeacher, layers: Sequence[int], top_k: int | None) -> Outputs:
    """The teacher's logits, [B, S, V] or the largest `top_k` and their ids, and its activations after `layers`."""

    def outputs(weights: Tree, batch: Batch) -> Batch:
        hidden, features = teacher.features(weights, batch, layers)
        columns = {feature_column(index): feature for index, feature in enumerate(features)}
        logits = teacher.logits(weights, hidden)
        if top_k is None:
            return {**columns, LOGITS: logits}
        values, ids = jax.lax.top_k(logits, top_k)
        return {**columns, LOGITS: values, IDS: ids}

    return outputs


def logprob_outputs(teacher: Scorer) -> Outputs:
    """The teacher's log-probs, [B, S], of the text in the teacher's tokens (text_alignment.py)."""
    return lambda weights, batch: {LOGPROBS: teacher(weights, teacher_columns(batch), None, is_adapted=True)}


@dataclasses.dataclass(frozen=True)
class SeparateTeacher:
    """Runs the teacher on its devices, and adds its outputs to batches on the student's."""

    outputs: Outputs
    weights: Tree
    sharder: Sharder
    """The teacher's."""
    student: Sharder
    spec: BatchSpec
    """Batches of the student."""
    parts: int
    """Micro-batches of a batch, to bound the memory of a forward pass; that of the outputs is of the whole batch."""

    def __call__(self, batch: Batch) -> Batch:
        inputs = {name: jax.device_put(column, self._input_sharding(column.ndim)) for name, column in batch.items()}
        columns = self._run(self.weights, inputs)
        return {**batch, **jax.device_put(columns, self._output_shardings(columns))}

    def shapes(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arrays or shapes like those of a batch with the teacher's outputs."""
        columns = jax.eval_shape(self._run, self.weights, dict(batch))
        shardings = self._output_shardings(columns)
        described = {
            name: jax.ShapeDtypeStruct(column.shape, column.dtype, sharding=shardings[name])
            for name, column in columns.items()
        }
        return {**batch, **described}

    @cached_property
    def _run(self) -> Any:
        def run(weights: Tree, batch: Batch) -> Batch:
            return map_microbatches(lambda part: self.outputs(weights, part), batch, self.parts)

        return jax.jit(run)

    def _input_sharding(self, dimensions: int) -> jax.sharding.Sharding:
        sharding = self.sharder.sharding(("act_batch", "act_length"))
        return dataclasses.replace(self.spec, sharding=sharding).sharding_of(dimensions)

    def _output_shardings(self, columns: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Logits of all tokens are sharded as the student's own."""
        vocabulary = {} if IDS in columns else {LOGITS: "act_vocab"}
        shardings = {}
        for name, column in columns.items():
            axes = ("act_batch", "act_length", vocabulary.get(name))[: column.ndim]
            shardings[name] = NamedSharding(self.student.mesh, self.student.dividing_spec(axes, column.shape))
        return shardings


@dataclasses.dataclass(frozen=True)
class TeacherBatches(DerivedBatches):
    """Batches with the outputs of a teacher on its own devices."""

    teacher: SeparateTeacher

    def peek(self) -> Mapping[str, Any]:
        return self.teacher.shapes(self.source.peek())

    def take(self, step: int, state: TrainState) -> Batch:
        return self.teacher(self.source.take(step, state))


def check_batches(spec: BatchSpec, train: Train, teacher: Sharder) -> None:
    """Raise ConfigError if the teacher's mesh does not divide a batch of the student."""
    shards, length_shards = teacher.num_shards("act_batch"), teacher.num_shards("act_length")
    for size in sorted({size for _, size in spec.ramp} | {spec.batch}):
        rows = size // train.grad_accum
        if rows % shards:
            reason = f"has {shards} shards of rows, which do not divide the {rows} rows of a micro-batch"
            hint = "change task.teacher.devices, task.teacher.mesh or train.per_device_batch_size"
            raise ConfigError(Problem("task.teacher.mesh", reason, accepted=f"a divisor of {rows}", hint=hint))
        if teacher.stages > 1:
            teacher.pipeline_schedule(rows)
    if train.seq_len % length_shards:
        reason = f"has {length_shards} shards of a sequence, which do not divide train.seq_len={train.seq_len}"
        raise ConfigError(Problem("task.teacher.mesh", reason, accepted=f"a divisor of {train.seq_len}"))
