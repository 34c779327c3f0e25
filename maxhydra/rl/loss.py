"""The policy loss of a batch of rollouts."""

import jax

from maxhydra.config.schema.tasks.grpo import GrpoTask
from maxhydra.rl.losses import Logprobs, policy_loss
from maxhydra.rl.setup import policy_weights
from maxhydra.train import Scorer
from maxhydra.train.loss import Batch, LossFn, Sums, Tree, add_aux_losses

# Columns of a batch that rl/batches.py computes before training on it.
OLD_LOGPROBS, REFERENCE_LOGPROBS = "old_logprobs", "reference_logprobs"


def group_loss(scorer: Scorer, task: GrpoTask) -> LossFn:
    """The loss of task.loss. A batch without `old_logprobs` is on-policy: the current weights sampled it."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        new, aux = scorer.score(policy_weights(weights), batch, key, is_adapted=True)
        logprobs = Logprobs(
            new=new,
            old=batch.get(OLD_LOGPROBS, jax.lax.stop_gradient(new)),
            sampled=batch["sampled_logprobs"],
            reference=batch.get(REFERENCE_LOGPROBS),
        )
        return add_aux_losses(policy_loss(logprobs, batch["advantages"], batch["weights"], task), aux)

    return loss
