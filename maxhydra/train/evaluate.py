"""Evaluation of a state on held-out batches."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import jax
import jax.numpy as jnp

from maxhydra.runtime import signals
from maxhydra.train.loss import AUX, AUX_LOSS, Batch, LossFn, Sums
from maxhydra.train.microbatch import sum_microbatches
from maxhydra.train.state import TrainState

Evaluate = Callable[[TrainState], dict[str, float]]


def held_out_loss(
    loss_fn: LossFn, batches: Callable[[], Iterator[Batch]], *, limit: int, parts: int
) -> Evaluate | None:
    """Token-weighted means over the first `limit` held-out batches: `eval/loss` and the other sums of the loss.

    `eval/loss` excludes what only training adds: the aux losses of layers, and everything but the likelihood (`nll`) if
    the loss reports one. A batch is processed in `parts` micro-batches, like a training step, because it may not fit in
    memory otherwise. Returns None for a limit of 0.
    """
    sums_of = jax.jit(
        lambda weights, batch: sum_microbatches(lambda microbatch: loss_fn(weights, microbatch, None), batch, parts)
    )

    def evaluate(state: TrainState) -> dict[str, float]:
        weights = state.weights
        total = _add_up(sums_of(weights, batch) for batch in islice(batches(), limit))
        total.pop(AUX, None)
        means = {name: float(value / total["weight"]) for name, value in total.items() if name != "weight"}
        means["loss"] -= means.pop(AUX_LOSS, 0.0)
        if "nll" in means:
            means["loss"] = means.pop("nll")
            means["perplexity"] = float(jnp.exp(means["loss"]))
        return {**{f"eval/{name}": mean for name, mean in means.items()}, "eval/tokens": float(total["weight"])}

    return evaluate if limit else None


def _add_up(batch_sums: Iterable[Sums]) -> Sums:
    """The sums over all batches; raises Interrupted between two of them if a signal arrives."""
    batch_sums = iter(batch_sums)
    total = next(batch_sums)
    for sums in batch_sums:
        # At most two batches are in flight: a signal does not wait for a queue of them.
        jax.block_until_ready(total)
        signals.check()
        total = jax.tree.map(jnp.add, total, sums)
    return total
