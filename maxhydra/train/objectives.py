"""Losses over the model, as sums: what pretraining and evaluation minimise and measure."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp

from maxhydra.config.schema.run import Train
from maxhydra.layers import Context
from maxhydra.layers.kernel_options import KernelChoice
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train.loss import SIDE_LOSS, TOLD, Sums, add_aux_losses, cross_entropy
from maxhydra.train.microbatch import sum_microbatches
from maxhydra.train.state import TrainState, Tree
from maxhydra.train.step import Batch, LossFn

Evaluate = Callable[[TrainState], dict[str, float]]


def next_token_loss(model: ModelDef, sharder: Sharder, train: Train) -> LossFn:
    """Cross-entropy of each next token, and what layers add to it; without a key, dropout is off."""

    kernels = model.config.kernels

    def loss(params: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        context = Context.of_batch(batch, sharder, key)
        forward = model.forward(params, batch["tokens"], context, ahead=True)
        of_targets = partial(
            cross_entropy,
            lambda hidden: model.logits(params, hidden, sharder),
            z_loss=train.z_loss,
            chunk=train.loss_chunk,
            wanted=KernelChoice(kernels.linear_cross_entropy.value, kernels.sizes("linear_cross_entropy")),
            place=context.place,
        )
        sums = add_aux_losses(of_targets(forward.hidden_BTD, batch["targets"], batch["weights"]), forward.sides)
        if not forward.ahead:
            return sums
        further = [of_targets(hidden, *mtp_targets(batch, by)) for by, hidden in enumerate(forward.ahead, start=1)]
        means = {name: sum(part[name] for part in further) / len(further) for name in ("loss", "nll")}
        return {**sums, "loss": sums["loss"] + model.config.mtp.loss_weight * means["loss"], "mtp_loss": means["nll"]}

    return loss


def mtp_targets(batch: Batch, by: int) -> tuple[jax.Array, jax.Array]:
    """Targets of each place so many tokens later, and their weights: none beyond the end of a document or row."""
    targets, weights = (jnp.roll(batch[name], -by, axis=1) for name in ("targets", "weights"))
    is_there = jnp.arange(targets.shape[1]) < targets.shape[1] - by
    if "segments" in batch:
        is_there = is_there & (batch["segments"] == jnp.roll(batch["segments"], -by, axis=1))
    return targets, jnp.where(is_there, weights, 0)


def held_out_loss(
    loss_fn: LossFn, batches: Callable[[], Iterator[Batch]], *, limit: int, parts: int
) -> Evaluate | None:
    """Means over the first `limit` held-out batches, exact to the token: `eval/loss`, and what else the loss sums up.

    What training adds is left out: the losses of layers, and all but the likelihood (`nll`) where there is one. A batch
    is taken in as many `parts` as a step takes it, since it may not fit otherwise. None: a limit of 0.
    """
    sums_of = jax.jit(lambda weights, batch: sum_microbatches(lambda part: loss_fn(weights, part, None), batch, parts))

    def evaluate(state: TrainState) -> dict[str, float]:
        weights = state.weights
        total = _sum(sums_of(weights, batch) for batch in islice(batches(), limit))
        total.pop(TOLD, None)
        means = {name: float(value / total["weight"]) for name, value in total.items() if name != "weight"}
        means["loss"] -= means.pop(SIDE_LOSS, 0.0)
        if "nll" in means:
            means["loss"] = means.pop("nll")
            means["perplexity"] = float(jnp.exp(means["loss"]))
        return {**{f"eval/{name}": mean for name, mean in means.items()}, "eval/tokens": float(total["weight"])}

    return evaluate if limit else None


def _sum(parts: Iterable[Sums]) -> Sums:
    parts = iter(parts)
    total = next(parts)
    for part in parts:
        total = jax.tree.map(jnp.add, total, part)
    return total
