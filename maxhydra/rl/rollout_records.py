"""Writes the records of rollouts, some of them only after the training step that completes them.

A batch without old log-probs is scored by the trainer in the forward pass of its step. The sampler error of its
completions comes from that pass: the records are kept until a later step was dispatched, or a checkpoint is saved.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.rl.loss import SAMPLER_ERROR
from maxhydra.rl.pairs import ROLES

Record = dict[str, Any]


class _Unwritten(NamedTuple):
    step: int
    records: Sequence[Record]
    values: Mapping[str, jax.Array]
    """Values of the batch's rows; empty until the step was dispatched."""


class RecordWriter:
    """Appends records in the order of steps. Without a store it does nothing."""

    def __init__(self, store: RolloutWriter | None):
        self._store = store
        self._unwritten: deque[_Unwritten] = deque()

    def add(self, step: int, records: Sequence[Record], *, is_complete: bool) -> None:
        """Records of the batch that is first trained on in this step; complete ones are written at once."""
        if self._store is None:
            return
        self._unwritten.append(_Unwritten(step, records, {}))
        if is_complete:
            self.flush()

    def observe(self, step: int, values: Mapping[str, jax.Array]) -> None:
        """Take the values of a step that was just dispatched, and write the records of those before it."""
        while self._unwritten and self._unwritten[0].step < step:
            self._write(self._unwritten.popleft())
        if self._unwritten and self._unwritten[0].step == step:
            self._unwritten[0] = self._unwritten[0]._replace(values=values)

    def flush(self) -> None:
        """Write all records; waits for the steps that complete them."""
        while self._unwritten:
            self._write(self._unwritten.popleft())

    def _write(self, batch: _Unwritten) -> None:
        assert self._store is not None
        records = batch.records
        if SAMPLER_ERROR in batch.values:
            records = with_sampler_errors(records, np.asarray(jax.device_get(batch.values[SAMPLER_ERROR])))
        self._store.append(batch.step, records)


def with_sampler_errors(records: Sequence[Record], errors: np.ndarray) -> list[Record]:
    """The records of used completions with the sampler errors of a batch: [B] of rows, or [P, 2] of pairs."""
    prompts = {number: row for row, number in enumerate(dict.fromkeys(record["prompt_number"] for record in records))}
    found = []
    for row, record in enumerate(records):
        value = math.nan
        if record["is_used"]:
            pair = errors.ndim == 2
            value = errors[prompts[record["prompt_number"]], ROLES.index(record["role"])] if pair else errors[row]
        # Log-probs of the sampler are unknown in rollouts that an older version sampled.
        is_known = math.isfinite(value)
        found.append({**record, SAMPLER_ERROR: round(float(value), 6)} if is_known else record)
    return found
