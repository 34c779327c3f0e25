"""Batches of rollouts for the training loop: on-policy, sampled ahead in a background thread, or asynchronous."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.tasks.policy import PAIRWISE
from maxhydra.config.schema.tasks.training import GrpoTask, is_kl_in_reward
from maxhydra.data import BatchSpec, Loader, Row
from maxhydra.layers.context import EXPERTS
from maxhydra.model import values_of
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.rl.advantages import advantages, critic_advantages, explained_variance
from maxhydra.rl.loss import OLD_LOGPROBS, OLD_VALUES, REFERENCE_LOGPROBS, RETURNS
from maxhydra.rl.pairs import (
    ROLES,
    TOKEN_COLUMNS,
    choose_pair,
    interleaved_rows,
    pair_columns,
    with_sampler_columns,
)
from maxhydra.rl.rollout import Group, Rollout, RolloutWorker, columns, metrics
from maxhydra.rl.rollout_records import RecordWriter, with_sampler_errors
from maxhydra.rl.setup import REFERENCE, policy_weights
from maxhydra.runtime import signals
from maxhydra.train import Scorer
from maxhydra.train.evaluate import map_microbatches
from maxhydra.train.loss import Batch, Tree
from maxhydra.train.state import TrainState

COLUMNS = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "weights": np.float32}
COLUMNS |= {"sampled_logprobs": np.float32, "advantages": np.float32}

CRITIC_COLUMNS = (OLD_VALUES, RETURNS)
# (weights, batch) -> log-prob columns [B, S] that are added to a batch before it is trained on.
LogprobFn = Callable[[Tree, Batch], dict[str, jax.Array]]


class RolloutBatches:
    """A `train.BatchSource` of rollouts, each used for task.iterations updates.

    Rollouts that were sampled ahead or are still in use are saved with the position, because the weights that sampled
    them no longer exist after a resume. A signal abandons an on-policy rollout, which a resume repeats; those that are
    sampled ahead are completed first.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        loader: Loader[list[Row]],
        spec: BatchSpec,
        logprob_fn: LogprobFn,
        writer: RolloutWriter | None = None,
    ):
        self._worker, self._loader, self._spec, self._logprob_fn = worker, loader, spec, logprob_fn
        self._writer, self._records_writer = writer, RecordWriter(writer)
        self._task = worker.task
        self._num_prompts = 0
        """Prompts sampled so far; numbers the next one for its seed."""
        self._current: Rollout | None = None
        self._uses_left = 0
        """Updates that are still to be made on the current rollout."""
        self._num_informative = 0
        """Rollouts used so far with a group whose rewards differ."""
        self._batch: Batch = {}
        self._position: dict[str, Any] | None = None
        """The position before the rollout that is being sampled on-policy."""
        self._queue: deque[Future[Rollout]] = deque()
        # One thread, so that rollouts are made in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    def peek(self) -> Mapping[str, Any]:
        shape, sharding = (self._spec.batch, self._spec.rows.seq_len), self._spec.sharding
        if self._task.loss in PAIRWISE:
            empty = {name: np.zeros((2 * shape[0], shape[1]), dtype) for name, dtype in TOKEN_COLUMNS.items()}
            return self._to_device(pair_columns({**empty, REFERENCE_LOGPROBS: empty["weights"]}))
        dtypes = {**COLUMNS, **dict.fromkeys(loss_columns(self._task), np.float32)}
        columns = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
        if self._task.router_replay:
            per_token = self._worker.engine.expert_shape
            columns[EXPERTS] = jax.ShapeDtypeStruct((*shape, *per_token), np.int16, sharding=sharding)
        return columns

    def take(self, step: int, state: TrainState) -> Batch:
        if not self._uses_left:
            rollout = self._next(step, state.weights)
            self._set_current(rollout, uses=self._task.iterations)
            self._records_writer.add(step, rollout.records, is_complete=OLD_LOGPROBS in rollout.columns)
        self._uses_left -= 1
        return self._batch

    def observe(self, step: int, row_values: Mapping[str, jax.Array]) -> None:
        self._records_writer.observe(step, row_values)

    def state(self) -> dict[str, Any]:
        # A checkpoint comes after the records of its steps, which a resume does not write again.
        self._records_writer.flush()
        queued = [future.result().to_json() for future in self._queue]
        current = self._current.to_json() if self._current is not None and self._uses_left else None
        return {
            **(self._position or self._prompt_position()),
            "ahead": queued,
            "current": current,
            "uses": self._uses_left,
            "informative": self._num_informative,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._loader.restore(state["prompts"])
        self._num_prompts = int(state["asked"])
        self._queue = deque(self._thread.submit(Rollout.from_json, rollout) for rollout in state["ahead"])
        if state["current"] is not None:
            self._set_current(Rollout.from_json(state["current"]), uses=int(state["uses"]))
        # After _set_current, which counts the rollout a second time; older checkpoints have no count.
        self._num_informative = int(state.get("informative", 1))

    def metrics(self) -> dict[str, float]:
        rollout_metrics = self._current.metrics if self._current else {}
        return {**self._loader.metrics(), **rollout_metrics, "groups/informative": float(self._num_informative)}

    def close(self) -> None:
        for future in self._queue:
            future.cancel()
        self._thread.shutdown(wait=self._position is None)
        self._loader.close()
        self._records_writer.flush()

    def _prompt_position(self) -> dict[str, Any]:
        return {"prompts": self._loader.state(), "asked": self._num_prompts}

    def _set_current(self, rollout: Rollout, *, uses: int) -> None:
        self._current, self._uses_left = rollout, uses
        self._batch = self._to_device(with_sampler_columns(rollout.columns))
        self._num_informative += rollout.metrics["groups/degenerate"] < 1

    def _next(self, step: int, weights: Tree) -> Rollout:
        """The next rollout. One that is sampled ahead needs a copy of the weights, which the next step donates."""
        if not self._task.off_policy_steps:
            self._position = self._prompt_position()
            rollout = signals.wait(self._thread.submit(self._make, weights))
            self._position = None
            return rollout
        copy = jax.tree.map(jnp.copy, weights)
        while len(self._queue) <= self._task.off_policy_steps:
            self._queue.append(self._thread.submit(self._make, copy))
        rollout = signals.wait(self._queue[0])
        self._queue.popleft()
        return rollout

    def _make(self, weights: Tree) -> Rollout:
        groups, batch_size = self._worker.sample_batch(policy_weights(weights), self._loader, number=self._num_prompts)
        self._num_prompts += len(groups)
        return self._arrange(groups, batch_size, weights)

    def _arrange(self, groups: Sequence[Group], batch_size: int, weights: Tree) -> Rollout:
        """A batch of the first `batch_size` groups, with log-probs under `weights`."""
        task, batch = self._task, groups[:batch_size]
        if task.loss in PAIRWISE:
            return self._arrange_pairs(groups, batch_size, weights)
        arrays, values = columns(batch, task, self._spec.rows.seq_len), metrics(groups, batch_size, task)
        if logprob_columns(task):
            placed = {**arrays, "advantages": np.zeros_like(arrays["weights"])}
            arrays |= jax.device_get(self._logprob_fn(weights, self._to_device(placed)))
        log_ratio_BS = None
        if is_kl_in_reward(task):
            log_ratio_BS = arrays[OLD_LOGPROBS] - arrays.pop(REFERENCE_LOGPROBS)
            values["kl"] = float((log_ratio_BS * arrays["weights"]).sum() / max(arrays["weights"].sum(), 1))
        rewards_PG, mask_BS = np.array([group.rewards for group in batch]), arrays["weights"]
        if task.has_value_head:
            found = critic_advantages(rewards_PG, arrays[OLD_VALUES], mask_BS, task, log_ratio_BS)
            arrays["advantages"], arrays[RETURNS] = found
            values["explained_variance"] = explained_variance(*(arrays[name][mask_BS > 0] for name in CRITIC_COLUMNS))
        else:
            arrays["advantages"] = advantages(rewards_PG, mask_BS, task, log_ratio_BS)
        return Rollout(arrays, values, self._records(groups, arrays))

    def _arrange_pairs(self, groups: Sequence[Group], batch_size: int, weights: Tree) -> Rollout:
        """A batch of pairs, one of each of the first `batch_size` groups."""
        batch, values = groups[:batch_size], metrics(groups, batch_size, self._task)
        pairs = [choose_pair(group, self._task) for group in batch]
        rows = interleaved_rows(batch, pairs, self._task, self._spec.rows.seq_len)
        rows |= jax.device_get(self._logprob_fn(weights, self._to_device(rows)))
        records = []
        for group, pair in zip_longest(groups if self._writer is not None else (), pairs):
            roles = dict(zip(pair or (), ROLES, strict=False))
            for index, record in enumerate(group.records() if group is not None else ()):
                records.append({**record, "is_used": index in roles, "role": roles.get(index)})
        return Rollout(pair_columns(rows), values, records)

    def _records(self, groups: Sequence[Group], arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
        """Records of all completions; those of the batch with their advantage.

        Also with their sampler error if old log-probs are known; otherwise the training step computes it.
        """
        if self._writer is None:
            return []
        records = [record for group in groups for record in group.records()]
        mask_BS = arrays["weights"] > 0
        for row, record in enumerate(records):
            is_used = row < len(mask_BS) and bool(mask_BS[row].any())
            record["is_used"] = is_used
            if is_used:
                record["advantage"] = round(float(arrays["advantages"][row][mask_BS[row]].mean()), 6)
        if OLD_LOGPROBS in arrays:
            error_BS = np.abs(np.where(mask_BS, arrays[OLD_LOGPROBS] - arrays["sampled_logprobs"], 0))
            total_B = np.where(mask_BS, np.exp(error_BS), 0).sum(axis=1)
            return with_sampler_errors(records, total_B / np.maximum(mask_BS.sum(axis=1), 1))
        return records

    def _to_device(self, columns: Mapping[str, np.ndarray]) -> Batch:
        """Global arrays of columns that every process holds."""

        def place(column: np.ndarray) -> jax.Array:
            sharding = self._spec.sharding_of(column.ndim)
            return jax.make_array_from_callback(column.shape, sharding, lambda index: column[index])

        return {name: place(column) for name, column in columns.items()}


class AsynchronousBatches(RolloutBatches):
    """Batches of rollouts that are sampled while the trainer updates the weights.

    The engine samples without pause. New weights are pushed to it after each update, in the middle of its episodes,
    which continue on their KV cache; every token has the log-prob under the weights that sampled it, and the importance
    weights of the loss correct for the difference. Batches are trained on in the order in which they were started, and
    one is started as soon as it will be trained on at most task.max_staleness updates later: this bounds the staleness
    of every token, and the queue.

    The position is the one before the oldest batch that was not taken: a resume samples the prompts of unfinished
    batches again.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        assert self._task.max_staleness is not None
        self._max_staleness = self._task.max_staleness
        self._started: deque[_StartedBatch] = deque()
        # Each batch that is being sampled has a thread, which waits for its episodes and computes their rewards.
        self._threads = ThreadPoolExecutor(self._max_staleness + 1, thread_name_prefix="rollouts")
        self._last_metrics = time.monotonic(), 0.0

    def take(self, step: int, state: TrainState) -> Batch:
        pushed = self._worker.engine.push(policy_weights(state.weights), version=step - 1)
        while self._uses_left + len(self._started) * self._task.iterations <= self._max_staleness:
            self._start(pushed)
        return super().take(step, state)

    def state(self) -> dict[str, Any]:
        oldest = self._started[0].position if self._started else {}
        return {**super().state(), **oldest}

    def metrics(self) -> dict[str, float]:
        """Also the throughput of the sampler since the last call, and how many batches are complete."""
        (last_time, last_tokens), now, tokens = self._last_metrics, time.monotonic(), self._worker.engine.num_sampled
        self._last_metrics = now, tokens
        return {
            **super().metrics(),
            "rollout/tokens_per_second": (tokens - last_tokens) / max(now - last_time, 1e-9),
            "rollout/queue": float(sum(batch.groups.done() for batch in self._started)),
        }

    def close(self) -> None:
        # Ends the episodes that the threads wait for.
        self._worker.engine.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _start(self, pushed: "Future[None]") -> None:
        """Start to sample a batch as soon as the current weights are loaded."""
        position, number, rows = self._prompt_position(), self._num_prompts, next(self._loader)
        self._num_prompts += len(rows)

        def sample() -> list[Group]:
            pushed.result()
            size = self._task.group_size
            return self._worker.sample_groups(None, rows, samples=size, temperature=1.0, number=number)

        self._started.append(_StartedBatch(position, self._threads.submit(sample)))

    def _next(self, step: int, weights: Tree) -> Rollout:
        started = time.monotonic()
        groups = signals.wait(self._started[0].groups)
        waited = time.monotonic() - started
        self._started.popleft()
        rollout = self._arrange(groups, len(groups), weights)
        episodes = [episode for group in groups for episode in group.episodes]
        stale = [[step - 1 - version for version in episode.versions] for episode in episodes]
        for record, ages in zip(rollout.records, stale, strict=False):
            record["staleness"] = max(ages, default=0)
        every = np.array([age for ages in stale for age in ages] or [0])
        values = {
            "rollout/staleness": float(every.mean()),
            "rollout/max_staleness": float(every.max()),
            "rollout/wait_seconds": waited,
        }
        return dataclasses.replace(rollout, metrics={**rollout.metrics, **values})


class _StartedBatch(NamedTuple):
    """A batch that is being sampled."""

    position: dict[str, Any]
    """The prompt position before it."""
    groups: "Future[list[Group]]"


def logprob_columns(task: GrpoTask) -> tuple[str, ...]:
    """The columns that `make_logprob_fn` adds.

    Old log-probs are needed if the weights change before or while a batch is used, and for a KL penalty in the reward;
    reference log-probs for any KL penalty; old values for a critic.
    """
    is_off_policy = task.iterations > 1 or task.off_policy_steps > 0
    needs_old = (is_off_policy and task.loss not in PAIRWISE) or is_kl_in_reward(task)
    columns = {OLD_LOGPROBS: needs_old, REFERENCE_LOGPROBS: task.kl.beta > 0, OLD_VALUES: task.has_value_head}
    return tuple(name for name, is_needed in columns.items() if is_needed)


def loss_columns(task: GrpoTask) -> tuple[str, ...]:
    """The columns that the loss reads in addition to COLUMNS: a KL penalty in the reward is part of the advantages."""
    fixed = tuple(name for name in logprob_columns(task) if name != REFERENCE_LOGPROBS or not is_kl_in_reward(task))
    return (*fixed, RETURNS) if task.has_value_head else fixed


def make_logprob_fn(scorer: Scorer, task: GrpoTask, *, parts: int) -> LogprobFn:
    """Log-probs and values of tokens that stay fixed while a batch is trained on, computed in `parts` micro-batches.

    The reference is the model without its adapter, or the initial weights stored under `REFERENCE`.
    """
    columns = logprob_columns(task)

    def logprobs_of(weights: Tree, batch: Batch) -> dict[str, jax.Array]:
        logprobs: dict[str, jax.Array] = {}
        if OLD_LOGPROBS in columns or OLD_VALUES in columns:
            scored = scorer.score(policy_weights(weights), batch, None, is_adapted=True)
            logprobs |= {OLD_LOGPROBS: scored.logprobs} if OLD_LOGPROBS in columns else {}
            logprobs |= {OLD_VALUES: values_of(weights, scored.hidden_BTD)} if OLD_VALUES in columns else {}
        if REFERENCE_LOGPROBS in columns:
            reference = weights.get(REFERENCE, policy_weights(weights))
            # The reference chooses its own experts.
            routed = {name: column for name, column in batch.items() if name != EXPERTS}
            logprobs[REFERENCE_LOGPROBS] = scorer(reference, routed, None, is_adapted=False)
        return logprobs

    # Replicated, so that every process can read all of them.
    return jax.jit(
        lambda weights, batch: map_microbatches(lambda part: logprobs_of(weights, part), batch, parts),
        out_shardings=scorer.sharder.sharding(()),
    )
