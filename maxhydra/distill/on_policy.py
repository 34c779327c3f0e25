"""On-policy distillation: batches in which the student has sampled the last assistant turn of each conversation.

The teacher scores the sampled ids in the training step, as it scores those of the data: the loss is the same, only the
tokens differ. Batches of both kinds have the same columns, so one compiled step trains on both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from maxhydra.config.schema.tasks.distill import OnPolicy
from maxhydra.data import BatchSpec, Loader, Row, Tokenizer, make_batch
from maxhydra.distill.loss import TEACHER
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.runtime import signals
from maxhydra.train import TrainState
from maxhydra.train.loss import Batch, Tree


class Sampled(Protocol):
    """A completion of a prompt."""

    tokens: list[int]
    text: str
    finish: str


# (the student's weights, prompts, index of the first prompt in the run) -> a completion of each prompt.
Sampler = Callable[[Tree, Sequence[Sequence[int]], int], Sequence[Sampled]]


class OnPolicyBatches:
    """A `train.BatchSource` of conversations, of which on_policy.fraction have completions of the student.

    A signal abandons the completions that are being sampled; a resume samples them again, with the same seeds.
    """

    def __init__(
        self,
        loader: Loader[list[Row]],
        spec: BatchSpec,
        task: OnPolicy,
        sampler: Sampler,
        *,
        tokenizer: Tokenizer,
        writer: RolloutWriter | None = None,
        add_columns: Callable[[Row], Row] | None = None,
    ):
        """`loader` reads all rows of a batch in every process, since each samples the completions of all.

        `add_columns` gives every row, after its completion was sampled, further columns.
        """
        self._add_columns = add_columns
        self._loader, self._spec, self._task, self._sampler = loader, spec, task, sampler
        self._tokenizer, self._writer = tokenizer, writer
        self._num_batches = self._num_prompts = 0
        """Batches and prompts so far; they number the next ones for their seeds."""
        self._position: dict[str, Any] | None = None
        """The position before the batch that is being sampled."""
        self._metrics: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    def peek(self) -> Mapping[str, Any]:
        return self._to_device(self._loader.peek())

    def take(self, step: int, state: TrainState) -> Batch:
        self._position = self._current_position()
        rows = next(self._loader)
        is_on_policy = self._is_on_policy(self._num_batches)
        self._metrics = {"on_policy": float(is_on_policy)}
        if is_on_policy:
            # Cross-entropy with its own samples would only make the student more certain of them.
            alpha = np.ones((), np.float32)
            rows = [{**row, "alpha": alpha} for row in self._with_completions(step, rows, state.weights)]
        self._num_batches += 1
        self._position = None
        return self._to_device(rows)

    def observe(self, step: int, row_values: Mapping[str, jax.Array]) -> None:
        """The losses of distillation have no values of rows."""

    def state(self) -> dict[str, Any]:
        return self._position or self._current_position()

    def restore(self, state: dict[str, Any]) -> None:
        self._loader.restore(state["data"])
        self._num_batches, self._num_prompts = int(state["batches"]), int(state["asked"])

    def metrics(self) -> dict[str, float]:
        return {**self._loader.metrics(), **self._metrics}

    def close(self) -> None:
        self._thread.shutdown(wait=self._position is None)
        self._loader.close()

    def _current_position(self) -> dict[str, Any]:
        return {"data": self._loader.state(), "batches": self._num_batches, "asked": self._num_prompts}

    def _is_on_policy(self, number: int) -> bool:
        return np.random.default_rng((self._spec.rows.seed, number)).random() < self._task.fraction

    def _with_completions(self, step: int, rows: list[Row], weights: Tree) -> list[Row]:
        """The rows with sampled completions. A row without an assistant turn, such as padding, stays unchanged."""
        student = {name: tree for name, tree in weights.items() if name != TEACHER}
        prompts = {index: prompt for index, row in enumerate(rows) if (prompt := prompt_of(row))}
        if not prompts:
            return rows
        future = self._thread.submit(self._sampler, student, list(prompts.values()), self._num_prompts)
        sampled = signals.wait(future)
        completions = dict(zip(prompts, sampled, strict=True))
        if self._writer is not None:
            self._writer.append(step, list(self._records(prompts, completions)))
        self._num_prompts += len(prompts)
        lengths = [len(completion.tokens) for completion in completions.values()]
        is_cut = [completion.finish == "length" for completion in completions.values()]
        self._metrics |= {"answers/tokens": float(np.mean(lengths)), "answers/truncated": float(np.mean(is_cut))}
        return [
            sampled_row(row, prompts[index], completions[index].tokens) if index in prompts else row
            for index, row in enumerate(rows)
        ]

    def _records(
        self, prompts: Mapping[int, Sequence[int]], completions: Mapping[int, Sampled]
    ) -> Iterator[dict[str, Any]]:
        """Lines of the run's rollouts; see record/rollout_store.py. They have no reward."""
        for number, (index, completion) in enumerate(completions.items(), self._num_prompts):
            yield {
                "prompt_number": number,
                "sample": 0,
                "prompt": self._tokenizer.decode(prompts[index]),
                "completion": completion.text,
                "reward": 0.0,
                "tokens": len(completion.tokens),
                "finish": completion.finish,
            }

    def _to_device(self, rows: Sequence[Row]) -> Batch:
        local = [rows[index] for index in self._spec.local_rows(len(rows)).tolist()]
        if self._add_columns is not None:
            local = [self._add_columns(row) for row in local]
        return make_batch(local, self._spec, len(rows))


def prompt_of(row: Row) -> list[int]:
    """Token ids before the last assistant turn of a conversation; empty for a row without one."""
    (trained,) = np.nonzero(row["weights"])
    if not len(trained):
        return []
    breaks = np.flatnonzero(np.diff(trained) > 1)
    start = int(trained[breaks[-1] + 1] if len(breaks) else trained[0])
    ids: list[int] = row["tokens"][: start + 1].tolist()
    return ids


def sampled_row(row: Row, prompt: Sequence[int], completion: Sequence[int]) -> Row:
    """A row with the columns of `row`: a prompt and its completion, of which only the completion has loss.

    A completion that is longer than the row is truncated.
    """
    filled: Row = {name: np.zeros_like(column) for name, column in row.items()}
    ids = np.array([*prompt, *completion], np.int32)[: len(row["tokens"]) + 1]
    count = len(ids) - 1
    filled["tokens"][:count], filled["targets"][:count] = ids[:-1], ids[1:]
    filled["positions"][:count] = np.arange(count)
    filled["weights"][len(prompt) - 1 : count] = 1
    if "segments" in filled:
        filled["segments"][:count] = 1
    return filled
