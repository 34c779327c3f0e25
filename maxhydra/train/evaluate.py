"""Evaluation of a state on held-out batches, one micro-batch at a time, to bound the memory of each pass."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from maxhydra.config import ConfigError, Problem
from maxhydra.runtime import signals
from maxhydra.train.loss import AUX, AUX_LOSS, Batch, LossFn, Sums
from maxhydra.train.state import TrainState

T = TypeVar("T")


def split_microbatches(batch: Batch, parts: int) -> Any:
    """Reshape the arrays of a batch to [parts, rows, ...].

    Row b * parts + i goes to micro-batch i: each device splits its own rows, so nothing moves between devices.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)


def map_microbatches(function: Callable[[Any], T], batch: Batch, parts: int) -> T:
    """Apply a row-wise function in micro-batches; the result is a tree of [B, ...]."""
    if parts == 1:
        return function(batch)
    outputs = jax.lax.map(function, split_microbatches(batch, parts))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), outputs)


def sum_microbatches(function: Callable[[Any], T], batch: Batch, parts: int) -> T:
    """Apply a function that returns sums over rows in micro-batches, and add up the results."""
    if parts == 1:
        return function(batch)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(function, split_microbatches(batch, parts)))


Evaluate = Callable[[TrainState], dict[str, float]]


def held_out_loss(
    loss_fn: LossFn, batches: Callable[[], Iterator[Batch]], *, limit: int, parts: int
) -> Evaluate | None:
    """Token-weighted means over the first `limit` held-out batches: `eval/loss` and the other sums of the loss.

    `eval/loss` excludes what only training adds: the aux losses of layers, and everything but the likelihood (`nll`) if
    the loss reports one. A batch is processed in `parts` micro-batches, like a training step, because it may not fit in
    memory otherwise. Returns None for a limit of 0, and raises ConfigError if no held-out token has a loss.
    """
    if not limit:
        return None
    _check_weights(batches, limit)
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

    return evaluate


def _check_weights(batches: Callable[[], Iterator[Batch]], limit: int) -> None:
    """Raise ConfigError before training if the mean over the held-out tokens would be 0/0; mostly reads one batch."""
    num_batches = 0
    for batch in islice(batches(), limit):
        weights = [array for name, array in batch.items() if name.endswith("weights")]
        if not weights or any(bool(jnp.any(array != 0)) for array in weights):
            return
        num_batches += 1
    if num_batches:
        reason = f"evaluates {num_batches} held-out batches in which no token has a loss, so eval/loss is undefined"
        hint = (
            "all of their tokens are masked or cut off: raise train.seq_len, see data.packing.overlong, or set it to 0"
        )
        raise ConfigError(Problem("train.eval_batches", reason, value=limit, hint=hint))


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
