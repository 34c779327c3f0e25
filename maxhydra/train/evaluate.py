"""Evaluation of a state on held-out batches, one micro-batch at a time, to bound the memory of each pass."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.run import Train
from maxhydra.data import BatchSpec, eval_batches
from maxhydra.data.rows import BYTES
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
    return join_microbatches(jax.lax.map(function, split_microbatches(batch, parts)))


def join_microbatches(outputs: T) -> T:
    """Arrays [B, ...] from those of micro-batches, [parts, rows, ...], as `split_microbatches` makes them."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), outputs)


def sum_microbatches(function: Callable[[Any], T], batch: Batch, parts: int) -> T:
    """Apply a function that returns sums over rows in micro-batches, and add up the results."""
    if parts == 1:
        return function(batch)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(function, split_microbatches(batch, parts)))


Evaluate = Callable[[TrainState], dict[str, float]]


Batches = Callable[[], Iterator[Batch]]


def held_out_loss(loss_fn: LossFn, batches: Batches, *, limit: int, parts: int) -> Evaluate | None:
    """Token-weighted means over the first `limit` held-out batches: `eval/loss` and the other sums of the loss.

    A batch is processed in `parts` micro-batches, like a training step, because it may not fit in memory otherwise.
    Returns None for a limit of 0, and raises ConfigError if no held-out token has a loss.
    """
    return _held_out_losses(loss_fn, {"": batches}, {}, limit=limit, parts=parts)


def held_out_likelihood(
    loss_fn: LossFn,
    data: Data,
    spec: BatchSpec,
    train: Train,
    *,
    add_columns: Callable[[Batch], Batch] | None = None,
) -> Evaluate | None:
    """As `held_out_loss` of the data, and `eval/NAME/loss` and `eval/NAME/bpb` of each source and of data.eval_sets.

    `add_columns` gives every batch further columns that the loss reads.
    """

    def batches_of(part: Data) -> Iterator[Batch]:
        batches = eval_batches(part, spec)
        return batches if add_columns is None else map(add_columns, batches)

    sets = {name: partial(batches_of, part) for name, part in data.held_out_sets().items()}
    extra = {name: sets.pop(name) for name in data.eval_sets}
    return _held_out_losses(loss_fn, sets, extra, limit=train.eval_batches, parts=train.grad_accum)


def _held_out_losses(
    loss_fn: LossFn, sets: Mapping[str, Batches], extra: Mapping[str, Batches], *, limit: int, parts: int
) -> Evaluate | None:
    """Evaluates a state on `sets`, together and, unless there is only one, each; and on each of the extra sets."""
    if not limit:
        return None
    for batches in (*sets.values(), *extra.values()):
        _check_weights(batches, limit)

    def microbatch_sums(weights: Any, batch: Batch) -> Sums:
        columns = {name: column for name, column in batch.items() if name != BYTES}
        sums = loss_fn(weights, columns, None)
        return {**sums, BYTES: jnp.sum(batch[BYTES] * batch["weights"])} if BYTES in batch else sums

    sums_of = jax.jit(lambda weights, batch: sum_microbatches(partial(microbatch_sums, weights), batch, parts))

    def evaluate(state: TrainState) -> dict[str, float]:
        totals: dict[str, dict[str, float]] = {}
        for name, batches in (*sets.items(), *extra.items()):
            total = _add_up(sums_of(state.weights, batch) for batch in islice(batches(), limit))
            totals[name] = {key: float(value) for key, value in total.items() if key != AUX}
        main = [totals[name] for name in sets if totals[name]]
        common = [key for key in main[0] if all(key in total for total in main)]
        metrics = _means({key: sum(total[key] for total in main) for key in common})
        for name, total in totals.items():
            if name and total:
                means = _means(total)
                metrics |= {f"{name}/{key}": means[key] for key in ("loss", "bpb") if key in means}
        return {f"eval/{name}": value for name, value in metrics.items()}

    return evaluate


def _means(total: Mapping[str, float]) -> dict[str, float]:
    """Metrics from sums over tokens: means, and of the likelihood also perplexity and bits per byte.

    `loss` excludes what only training adds: the aux losses of layers, and everything but the likelihood (`nll`) if the
    loss reports one.
    """
    means = {name: value / total["weight"] for name, value in total.items() if name not in ("weight", BYTES)}
    means["loss"] -= means.pop(AUX_LOSS, 0.0)
    if "nll" in means:
        means["loss"] = means.pop("nll")
        means["perplexity"] = float(np.exp(means["loss"]))
        if total.get(BYTES):
            means["bpb"] = total["nll"] / (math.log(2) * total[BYTES])
    return {**means, "tokens": total["weight"]}


def _check_weights(batches: Batches, limit: int) -> None:
    """Raise ConfigError before training if the mean over the held-out tokens would be 0/0; mostly reads one batch."""
    num_batches = 0
    for batch in islice(batches(), limit):
        weights = [array for name, array in batch.items() if name.endswith("weights")]
        if not weights or any(bool(jnp.any(array)) for array in weights):
            return
        num_batches += 1
    if num_batches:
        reason = f"evaluates {num_batches} held-out batches in which no token has a loss, so eval/loss is undefined"
        hint = (
            "all of their tokens are masked or cut off: raise train.seq_len, see data.packing.overlong, or set it to 0"
        )
        raise ConfigError(Problem("train.eval_batches", reason, value=limit, hint=hint))


def _add_up(batch_sums: Iterable[Sums]) -> Sums:
    """The sums over all batches, {} if there are none; raises Interrupted between two of them if a signal arrives."""
    batch_sums = iter(batch_sums)
    total = next(batch_sums, {})
    for sums in batch_sums:
        # At most two batches are in flight: a signal does not wait for a queue of them.
        jax.block_until_ready(total)
        signals.check()
        total = jax.tree.map(jnp.add, total, sums)
    return total
