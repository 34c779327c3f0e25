"""The one step builder: gradients over micro-batches, the guard against bad updates, the update."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxhydra.config.schema.run import Nonfinite, Spike, Train
from maxhydra.model import merge_trees
from maxhydra.optim import Optimizer
from maxhydra.train.loss import TOLD, Sums, load_metrics
from maxhydra.train.microbatch import split_microbatches
from maxhydra.train.state import Guard, TrainState

Tree = Any
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# (weights, batch, key) -> sums over the batch, `loss` and `weight` among them: the step minimises loss / weight.
# No key: no dropout.
LossFn = Callable[[Tree, Batch, jax.Array | None], Sums]
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
# (new, old, what layers told) -> the new weights, with what layers change in themselves.
Settle = Callable[[Tree, Tree, Tree], Tree]
# Trained weights -> the same in the number formats that the loss uses them in, by which it is differentiated.
Cast = Callable[[Tree], Tree]


def sequences_in(batch: Mapping[str, Any]) -> int:
    """How many sequences a batch has."""
    return int(next(iter(batch.values())).shape[0])


def _as_they_are(new: Tree, old: Tree, told: Tree) -> Tree:
    return new


def _uncast(weights: Tree) -> Tree:
    return weights


def make_step(
    loss_fn: LossFn, optimizer: Optimizer, train: Train, settle: Settle = _as_they_are, cast: Cast = _uncast
) -> StepFn:
    """A pure function (state, batch) -> (state, metrics), to be jitted with the state donated."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        def loss_of(changing: Tree, batch: Batch, key: jax.Array | None) -> Sums:
            params, history = changing
            return loss_fn(merge_trees(merge_trees(params, state.frozen), history), batch, key)

        changing = (cast(state.params), state.history)
        (grads, seen), sums = _gradients(loss_of, changing, batch, key, train.grad_accum, kept=state.params)
        told = sums.pop(TOLD, {})
        weight = _weight(sums)
        means = {name: total / weight for name, total in sums.items() if name not in ("weight", "nll")}
        # Before the division, while the gradients of layers that are written out are arrays of their own.
        grad_norm = optimizer.norm(grads) / weight
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, grads)

        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm)
        for leaf in jax.tree.leaves(seen):
            # What is clipped into a format's range would not show otherwise.
            finite &= jnp.all(jnp.isfinite(leaf))
        halted = state.guard.halted | (~finite & (train.on_nonfinite is Nonfinite.stop))
        observed = jnp.stack([means["loss"], grad_norm]).astype(jnp.float32)
        # Without any gradient nothing was learned, and weight decay and momentum alone would move the weights.
        counts = finite & ~halted & (grad_norm > 0)
        apply = counts & ~_is_spike(state.guard, observed, train.spike)

        with jax.named_scope("update"):
            transform = optax.with_extra_args_support(optimizer.transform)
            updates, opt_state = transform.update(grads, state.opt_state, state.params, norm=grad_norm)
            params = settle(optax.apply_updates(state.params, updates), state.params, told)
            params = optimizer.held(params, state.params)
            history = jax.tree.map(_remembering, state.history, seen)
            new, old = (params, opt_state, history), (state.params, state.opt_state, state.history)
            params, opt_state, history = _select(apply)(new, old)
        new_state = TrainState(
            step=state.step + jnp.where(halted, 0, 1),
            params=params,
            frozen=state.frozen,
            opt_state=opt_state,
            key=state.key,
            guard=_observe(state.guard, observed, train.spike, counts=counts, apply=apply, halted=halted),
            history=history,
        )
        learning_rate = optimizer.schedule(state.step - state.guard.skipped)
        metrics = {
            **means,
            **load_metrics(told),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": sums["weight"],
        }
        return new_state, {**metrics, "skipped": new_state.guard.skipped, "halted": new_state.guard.halted}

    return step


def _gradients(
    loss_fn: LossFn, changing: tuple[Tree, Tree], batch: Batch, key: jax.Array, micro_batches: int, *, kept: Tree
) -> tuple[tuple[Tree, Tree], Sums]:
    """Gradient of sum(loss) over the whole batch, with what stands as the gradient by what layers remember; and the
    sums.

    Micro-batches add up gradients of sums, to be divided once by the total weight, so that they equal the big batch
    even where their token counts differ. They add up in the formats of the weights as they are `kept`.
    """

    def total_loss(changing: tuple[Tree, Tree], batch: Batch, key: jax.Array) -> tuple[jax.Array, Sums]:
        sums = loss_fn(changing, batch, key)
        return sums["loss"], sums

    gradient = jax.grad(total_loss, has_aux=True)
    if micro_batches == 1:
        (grads, seen), sums = gradient(changing, batch, key)
    else:
        parts, keys = split_microbatches(batch, micro_batches), jax.random.split(key, micro_batches)

        def add(total: tuple[Tree, Sums], part: tuple[Batch, jax.Array]) -> tuple[tuple[Tree, Sums], None]:
            ((grads, seen), sums), ((more, also), further) = total, gradient(changing, *part)
            grads, sums = jax.tree.map(lambda sum, one: sum + one.astype(sum.dtype), (grads, sums), (more, further))
            return ((grads, jax.tree.map(jnp.maximum, seen, also)), sums), None

        shapes = jax.eval_shape(gradient, changing, jax.tree.map(lambda x: x[0], parts), keys[0])
        (_, seen), sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        zeros = ((jax.tree.map(jnp.zeros_like, kept), seen), sums)
        ((grads, seen), sums), _ = jax.lax.scan(add, zeros, (parts, keys))
    return (grads, seen), sums


def _remembering(history: jax.Array, seen: jax.Array) -> jax.Array:
    """Columns of the last steps, with what this step saw in front."""
    return jnp.concatenate([seen[..., :1], history[..., :-1]], axis=-1)


def _weight(sums: Sums) -> jax.Array:
    """What to divide by; a batch in which nothing is learned has loss 0 and no gradient."""
    return jnp.where(sums["weight"] == 0, 1, sums["weight"])


def _select(condition: jax.Array) -> Callable[[Tree, Tree], Tree]:
    return lambda new, old: jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _is_spike(guard: Guard, observed: jax.Array, spike: Spike) -> jax.Array:
    """Loss or gradient norm over mean + sigmas * standard deviation, once enough steps were seen."""
    if spike.sigmas is None:
        return jnp.zeros((), jnp.bool_)
    return jnp.any(observed > _limit(guard, spike.sigmas)) & (guard.seen >= spike.warmup_steps)


def _limit(guard: Guard, sigmas: float) -> jax.Array:
    return guard.mean + sigmas * jnp.sqrt(guard.variance)


def _observe(
    guard: Guard, observed: jax.Array, spike: Spike, *, counts: jax.Array, apply: jax.Array, halted: jax.Array
) -> Guard:
    """Exponential mean and variance over the steps that count; while few were seen, their plain average.

    A spike counts as the largest that is none: one leaves little behind, and many in a row, as where other data begin,
    bring the limit up to them. Weights that stand still would never bring them down.
    """
    if spike.sigmas is not None:
        observed = jnp.where(apply, observed, jnp.minimum(observed, _limit(guard, spike.sigmas)))
    keep = jnp.minimum(spike.decay, guard.seen / (guard.seen + 1.0))
    delta = observed - guard.mean
    return Guard(
        mean=jnp.where(counts, guard.mean + (1 - keep) * delta, guard.mean),
        variance=jnp.where(counts, keep * (guard.variance + (1 - keep) * jnp.square(delta)), guard.variance),
        seen=guard.seen + counts,
        skipped=guard.skipped + (~apply & ~halted),
        halted=halted,
    )
