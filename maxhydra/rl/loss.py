"""Log-probabilities of answers under a model, and the loss over them."""

from collections.abc import Callable

import jax

from maxhydra.config.schema.tasks.grpo import GrpoTask
from maxhydra.rl.losses import Logprobs, policy_loss
from maxhydra.train import Scorer
from maxhydra.train.loss import Sums, add_aux_losses
from maxhydra.train.microbatch import map_microbatches
from maxhydra.train.state import Tree
from maxhydra.train.step import Batch, LossFn

# The name beside the model's own weights of those that training began with.
REFERENCE = "reference"
OLD, REFERRED = "old_logprobs", "reference_logprobs"

# (weights, batch) -> columns [B, S] that a batch is given before it is trained on.
Scoring = Callable[[Tree, Batch], dict[str, jax.Array]]


def own_weights(weights: Tree) -> Tree:
    """The model's own, without what a loss sees beside them."""
    return {name: below for name, below in weights.items() if name != REFERENCE}


def group_loss(scorer: Scorer, task: GrpoTask) -> LossFn:
    """The loss of task.loss. Without `old_logprobs` in the batch, its answers were written by the weights at hand."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        new, sides = scorer.scored(own_weights(weights), batch, key, is_adapted=True)
        logprobs = Logprobs(
            new=new,
            old=batch.get(OLD, jax.lax.stop_gradient(new)),
            sampled=batch["sampled_logprobs"],
            reference=batch.get(REFERRED),
        )
        return add_aux_losses(policy_loss(logprobs, batch["advantages"], batch["weights"], task), sides)

    return loss


def scored_columns(task: GrpoTask) -> tuple[str, ...]:
    """The columns that `scoring` adds: old ones where the weights move on before a batch is used, or while it is."""
    is_stale = task.iterations > 1 or task.off_policy_steps > 0
    return (*((OLD,) if is_stale else ()), *((REFERRED,) if task.kl.beta > 0 else ()))


def scoring(scorer: Scorer, task: GrpoTask, *, parts: int) -> Scoring:
    """The log-probabilities of a batch's tokens that stay as they are while it is trained on.

    The reference is the model without its adapter, or the weights that lie beside the model's own. `parts`: into how
    many a batch is cut, one after another.
    """
    columns = scored_columns(task)

    def score(weights: Tree, batch: Batch) -> dict[str, jax.Array]:
        found: dict[str, jax.Array] = {}
        if OLD in columns:
            found[OLD] = scorer(own_weights(weights), batch, None, is_adapted=True)
        if REFERRED in columns:
            starting = weights.get(REFERENCE, own_weights(weights))
            found[REFERRED] = scorer(starting, batch, None, is_adapted=False)
        return found

    return jax.jit(lambda weights, batch: map_microbatches(lambda part: score(weights, part), batch, parts))
