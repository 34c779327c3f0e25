"""Batches of answers for the training loop: written with the weights at hand, or ahead of time in a thread."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.data import BatchSpec, Loader, Row
from maxhydra.rl.loss import Scoring, own_weights, scored_columns
from maxhydra.rl.rollout import Rollout, RolloutWorker
from maxhydra.train.state import TrainState, Tree
from maxhydra.train.step import Batch

COLUMNS = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "weights": np.float32}
COLUMNS |= {"sampled_logprobs": np.float32, "advantages": np.float32}


class RolloutBatches:
    """`train.Batches`, each used task.iterations times. What was written ahead, or is still in use, is saved with the
    position: the weights that wrote it are gone."""

    def __init__(self, rollouts: RolloutWorker, loader: Loader[list[Row]], spec: BatchSpec, scoring: Scoring):
        self._rollouts, self._loader, self._spec, self._scoring = rollouts, loader, spec, scoring
        self._task = rollouts.task
        self._asked = 0
        self._current: Rollout | None = None
        self._uses = 0
        """Updates that are still to be made on the current one."""
        self._batch: Batch = {}
        self._ahead: deque[Future[Rollout]] = deque()
        # One worker, so that batches are made in order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    def peek(self) -> Mapping[str, Any]:
        shape, sharding = (self._spec.batch, self._spec.rows.seq_len), self._spec.sharding
        kinds = {**COLUMNS, **dict.fromkeys(scored_columns(self._task), np.float32)}
        return {name: jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for name, kind in kinds.items()}

    def take(self, state: TrainState) -> Batch:
        if not self._uses:
            self._use(self._next(state.weights), uses=self._task.iterations)
        self._uses -= 1
        return self._batch

    def state(self) -> dict[str, Any]:
        ahead = [future.result().to_json() for future in self._ahead]
        current = self._current.to_json() if self._current is not None and self._uses else None
        return {
            "prompts": self._loader.state(),
            "asked": self._asked,
            "ahead": ahead,
            "current": current,
            "uses": self._uses,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._loader.restore(state["prompts"])
        self._asked = int(state["asked"])
        self._ahead = deque(self._worker.submit(Rollout.from_json, kept) for kept in state["ahead"])
        if state["current"] is not None:
            self._use(Rollout.from_json(state["current"]), uses=int(state["uses"]))

    def metrics(self) -> dict[str, float]:
        return {**self._loader.metrics(), **(self._current.metrics if self._current else {})}

    def close(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._worker.shutdown(wait=True)
        self._loader.close()

    def _use(self, rollout: Rollout, *, uses: int) -> None:
        self._current, self._uses = rollout, uses
        self._batch = self._placed(rollout.columns)

    def _next(self, weights: Tree) -> Rollout:
        """The next rollout. One written ahead outlives these weights, which are the trainer's to overwrite: a copy."""
        if not self._task.off_policy_steps:
            return self._make(weights)
        copy = jax.tree.map(jnp.copy, weights)
        while len(self._ahead) <= self._task.off_policy_steps:
            self._ahead.append(self._worker.submit(self._make, copy))
        return self._ahead.popleft().result()

    def _make(self, weights: Tree) -> Rollout:
        seq_len = self._spec.rows.seq_len
        rollout, drawn = self._rollouts.draw(own_weights(weights), self._loader, seq_len=seq_len, number=self._asked)
        self._asked += drawn
        if not scored_columns(self._task):
            return rollout
        scores = jax.device_get(self._scoring(weights, self._placed(rollout.columns)))
        return Rollout({**rollout.columns, **scores}, rollout.metrics)

    def _placed(self, columns: Mapping[str, np.ndarray]) -> Batch:
        return {name: jax.device_put(column, self._spec.sharding) for name, column in columns.items()}
