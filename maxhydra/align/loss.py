"""From a batch of pairs to the sums that a step minimises and logs."""

import dataclasses

import jax
import jax.numpy as jnp

from maxhydra.align.losses import Answers, Pairs, losses, rewards
from maxhydra.config.schema.tasks.dpo import DpoTask, Reference
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import Scorer
from maxhydra.train.logprobs import ScoredTokens
from maxhydra.train.loss import Sums, add_aux_losses
from maxhydra.train.state import Tree
from maxhydra.train.step import Batch, LossFn

SIDES = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True)
class PairScorer:
    """Log-probabilities of the answers of a batch of pairs."""

    model: ModelDef
    sharder: Sharder
    chunk: int

    def __call__(self, weights: Tree, batch: Batch, key: jax.Array | None, *, is_adapted: bool) -> jax.Array:
        """[B, 2]: of the chosen and the rejected answer of each pair, in one forward pass over both."""
        return self.scored(weights, batch, key, is_adapted=is_adapted).logprobs

    def scored(self, weights: Tree, batch: Batch, key: jax.Array | None, *, is_adapted: bool) -> ScoredTokens:
        """The same, with what layers tell besides."""
        rows = {name: _beside(batch, name) for name in ("tokens", "targets", "positions", "weights")}
        found = Scorer(self.model, self.sharder, self.chunk).scored(weights, rows, key, is_adapted=is_adapted)
        return found._replace(logprobs=jnp.sum(rows["weights"] * found.logprobs, axis=1).reshape(-1, 2))


def preference_loss(scorer: PairScorer, task: DpoTask, reference: Reference) -> LossFn:
    """The loss of task.loss. Where the reference is cached, batches have its log-probs, [B] each."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        scores, sides = scorer.scored(weights, batch, key, is_adapted=True)
        if reference is Reference.adapter_off:
            anchors = jax.lax.stop_gradient(scorer(weights, batch, None, is_adapted=False))
        elif reference is Reference.cached:
            anchors = jnp.stack([batch[f"{side}_reference"] for side in SIDES], axis=1)
        else:
            anchors = jnp.zeros_like(scores)
        tokens = [jnp.sum(batch[f"{side}_weights"], axis=1) for side in SIDES]
        pairs = Pairs(*(Answers(scores[:, i], anchors[:, i], tokens[i]) for i in range(2)))
        return add_aux_losses(_sums(pairs, task), sides)

    return loss


def _sums(pairs: Pairs, task: DpoTask) -> Sums:
    """Over pairs: the loss, how many prefer the chosen answer, rewards and log-probs of both."""
    chosen, rejected = rewards(pairs.chosen, task), rewards(pairs.rejected, task)
    measured = {
        "accuracy": chosen > rejected,
        "reward_margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "logprob_chosen": pairs.chosen.logprobs,
        "logprob_rejected": pairs.rejected.logprobs,
    }
    sums = {name: jax.lax.stop_gradient(jnp.sum(pairs.counts * values)) for name, values in measured.items()}
    return {"loss": jnp.sum(losses(pairs, task)), "weight": jnp.sum(pairs.counts), **sums}


def _beside(batch: Batch, name: str) -> jax.Array:
    """A column of both answers of each pair, [2B, S], those of a pair side by side: no row leaves its device."""
    both = jnp.stack([batch[f"{side}_{name}"] for side in SIDES], axis=1)
    return both.reshape(-1, *both.shape[2:])


def passes(reference: Reference) -> float:
    """Forward and backward passes per pair: two answers, each once more forward where the adapter-off model is asked.

    A forward pass is a third of both.
    """
    return 2 + (2 / 3 if reference is Reference.adapter_off else 0)
