"""Reward models: scores of completions at their last token, and the losses that train them.

A batch has, for each completion, `tokens`, `positions` and `last`, the index of its last token, which is 0 in a padding
row; those of a pair have the prefix of their role.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.align.loss import ROLES, interleave
from maxhydra.config.schema.tasks.reward_model import RewardLoss, RewardModelTask
from maxhydra.data import Batch as DataBatch
from maxhydra.data import BatchSpec, Row, make_batch
from maxhydra.train.loss import Batch, LossFn, SequenceScorer, Sums, Tree, add_aux_losses

SEQUENCE = ("tokens", "positions", "last")


def reward_loss(scorer: SequenceScorer, task: RewardModelTask) -> LossFn:
    """The loss of task.loss, summed over pairs or completions."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        if task.loss is RewardLoss.regression:
            scores, aux = scorer(weights, batch, key)
            return add_aux_losses(_regression(scores, batch), aux)
        scores, aux = scorer(weights, {name: interleave(batch, name) for name in SEQUENCE}, key)
        return add_aux_losses(_bradley_terry(scores.reshape(-1, 2), batch, task), aux)

    return loss


def _bradley_terry(scores_B2: jax.Array, batch: Batch, task: RewardModelTask) -> Sums:
    """-log sigmoid(c - r - margin) + centering (c + r)^2."""
    chosen, rejected = scores_B2[:, 0], scores_B2[:, 1]
    counts = (batch["chosen_last"] > 0).astype(jnp.float32)
    losses = -jax.nn.log_sigmoid(chosen - rejected - batch.get("margin", 0.0))
    losses = losses + task.centering * jnp.square(chosen + rejected)
    metrics = {
        "accuracy": chosen > rejected,
        "reward_margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }
    return _sums(losses, counts, metrics)


def _regression(scores_B: jax.Array, batch: Batch) -> Sums:
    """(score - expected score)^2."""
    errors = scores_B - batch["score"]
    metrics = {"reward_mean": scores_B, "absolute_error": jnp.abs(errors)}
    return _sums(jnp.square(errors), (batch["last"] > 0).astype(jnp.float32), metrics)


def _sums(losses: jax.Array, counts: jax.Array, metrics: Mapping[str, jax.Array]) -> Sums:
    sums = {name: jax.lax.stop_gradient(jnp.sum(counts * values)) for name, values in metrics.items()}
    return {"loss": jnp.sum(counts * losses), "weight": jnp.sum(counts), **sums}


def completion_row(row: Row, role: str = "") -> Row:
    """The whole sequence of a row of tokens and targets, which has one token more than each of them.

    Its last token is the last that has loss: a template may write others after the end of the assistant's turn, which a
    sampled completion does not have.
    """
    with_loss = np.flatnonzero(row[f"{role}weights"])
    last = with_loss[-1] + 1 if len(with_loss) else 0
    tokens = np.append(row[f"{role}tokens"][:1], row[f"{role}targets"])
    index = np.arange(len(tokens), dtype=np.int32)
    return {
        f"{role}tokens": np.where(index <= last, tokens, 0).astype(np.int32),
        f"{role}positions": np.where(index <= last, index, 0),
        f"{role}last": np.array(last, np.int32),
    }


@dataclasses.dataclass(frozen=True)
class CompletionBatches:
    """Assembles batches of whole sequences, each one token longer than the rows that it is made of."""

    spec: BatchSpec
    loss: RewardLoss

    def __call__(self, rows: Sequence[Row], row_spec: BatchSpec, size: int) -> DataBatch:
        return make_batch([self._row(row) for row in rows], self.spec, size)

    def _row(self, row: Row) -> Row:
        if self.loss is RewardLoss.regression:
            return {**completion_row(row), "score": row["score"]}
        margin = {"margin": row["margin"]} if "margin" in row else {}
        return {
            **margin,
            **{name: column for role in ROLES for name, column in completion_row(row, f"{role}_").items()},
        }
