"""The preference loss of a batch of completion pairs."""

import dataclasses

import jax
import jax.numpy as jnp

from maxhydra.align.losses import Completions, Pairs, losses, rewards
from maxhydra.config.schema.tasks.dpo import DpoTask, Reference
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import Scorer
from maxhydra.train.logprobs import ScoredTokens
from maxhydra.train.loss import Batch, LossFn, Sums, Tree, add_aux_losses

# Prefixes of the columns of a pair.
ROLES = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True)
class PairScorer:
    """Log-probs of the completions of a batch of pairs."""

    model: ModelDef
    sharder: Sharder
    chunk: int

    def __call__(self, weights: Tree, batch: Batch, key: jax.Array | None, *, is_adapted: bool) -> jax.Array:
        """[B, 2]: summed log-probs of the chosen and the rejected completion, in one forward pass over both."""
        return self.score(weights, batch, key, is_adapted=is_adapted).logprobs

    def score(self, weights: Tree, batch: Batch, key: jax.Array | None, *, is_adapted: bool) -> ScoredTokens:
        """Like calling the scorer, and also returns the aux outputs of the layers."""
        rows = {name: _interleave(batch, name) for name in ("tokens", "targets", "positions", "weights")}
        tokens = Scorer(self.model, self.sharder, self.chunk).score(weights, rows, key, is_adapted=is_adapted)
        return tokens._replace(logprobs=jnp.sum(rows["weights"] * tokens.logprobs, axis=1).reshape(-1, 2))


def preference_loss(scorer: PairScorer, task: DpoTask, reference: Reference) -> LossFn:
    """The loss of task.loss. With a cached reference, batches contain its log-probs, [B] each."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        logprobs, aux = scorer.score(weights, batch, key, is_adapted=True)
        if reference is Reference.adapter_off:
            reference_logprobs = jax.lax.stop_gradient(scorer(weights, batch, None, is_adapted=False))
        elif reference is Reference.cached:
            reference_logprobs = jnp.stack([batch[f"{role}_reference"] for role in ROLES], axis=1)
        else:
            reference_logprobs = jnp.zeros_like(logprobs)
        tokens = [jnp.sum(batch[f"{role}_weights"], axis=1) for role in ROLES]
        pairs = Pairs(*(Completions(logprobs[:, i], reference_logprobs[:, i], tokens[i]) for i in range(2)))
        return add_aux_losses(_sums(pairs, task), aux)

    return loss


def _sums(pairs: Pairs, task: DpoTask) -> Sums:
    """Sums over pairs of the loss, accuracy, rewards and log-probs."""
    chosen, rejected = rewards(pairs.chosen, task), rewards(pairs.rejected, task)
    metrics = {
        "accuracy": chosen > rejected,
        "reward_margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "logprob_chosen": pairs.chosen.logprobs,
        "logprob_rejected": pairs.rejected.logprobs,
    }
    sums = {name: jax.lax.stop_gradient(jnp.sum(pairs.counts * values)) for name, values in metrics.items()}
    return {"loss": jnp.sum(losses(pairs, task)), "weight": jnp.sum(pairs.counts), **sums}


def _interleave(batch: Batch, name: str) -> jax.Array:
    """A column of both completions as [2B, S], those of a pair adjacent, so that no row leaves its device."""
    both = jnp.stack([batch[f"{role}_{name}"] for role in ROLES], axis=1)
    return both.reshape(-1, *both.shape[2:])


def passes(reference: Reference) -> float:
    """Forward and backward passes per pair: two, plus a forward pass over each completion for adapter_off.

    A forward pass costs a third of both.
    """
    return 2 + (2 / 3 if reference is Reference.adapter_off else 0)
