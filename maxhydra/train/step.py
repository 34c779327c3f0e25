"""The training step: gradients over micro-batches, the guard against bad updates, the optimizer update."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxhydra.config.schema.run import Nonfinite, Spike, Train
from maxhydra.layers.context import collect_statistics
from maxhydra.layers.statistics import add_aux, is_maximum
from maxhydra.model import merge_trees
from maxhydra.optim import Optimizer
from maxhydra.train.evaluate import join_microbatches, split_microbatches
from maxhydra.train.loss import AUX, ROW_VALUES, Batch, LossFn, Sums, Tree, layer_metrics
from maxhydra.train.state import DEFAULT_LAYOUT, Guard, StateLayout, TrainState, unchanged
from maxhydra.train.statistics import STATISTICS, reduce_step

Metrics = dict[str, jax.Array]
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
# (new params, old params, aux statistics of layers) -> new params with router biases and QK-Clip applied.
ApplyRouterBias = Callable[[Tree, Tree, Tree], Tree]
# Trainable params -> the same in the compute dtypes; the loss is differentiated with respect to the result.
Cast = Callable[[Tree], Tree]


def sequences_in(batch: Mapping[str, Any]) -> int:
    """Number of sequences in a batch."""
    return int(next(iter(batch.values())).shape[0])


def _keep_params(new: Tree, old: Tree, aux: Tree) -> Tree:
    return new


def make_step(
    loss_fn: LossFn,
    optimizer: Optimizer,
    train: Train,
    apply_router_bias: ApplyRouterBias = _keep_params,
    cast: Cast = unchanged,
    layout: StateLayout = DEFAULT_LAYOUT,
    *,
    has_statistics: bool = False,
) -> StepFn:
    """A pure function (state, batch) -> (state, metrics, with STATISTICS if asked), to jit with the state donated."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        def loss_of(trainable: Tree, batch: Batch, key: jax.Array | None) -> Sums:
            params, history = trainable
            return loss_fn(merge_trees(merge_trees(params, state.frozen), history), batch, key)

        # The "gradient" with respect to the amax history is the amaxes of this step (layers/quant/training.py).
        trainable = (cast(layout.load_params(state.params)), state.history)
        with collect_statistics(has_statistics):
            (grads, amaxes), sums = _gradients(loss_of, trainable, batch, key, train, optimizer, like=state.params)
        grads = layout.shard_gradients(grads)
        aux, row_values, weight = sums.pop(AUX, {}), sums.pop(ROW_VALUES, {}), _nonzero_weight(sums)
        means = {name: total / weight for name, total in sums.items() if name not in ("weight", "nll")}
        # Before the division, while the gradients of unrolled layers are still separate arrays.
        grad_norm = optimizer.norm(grads) / weight
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, grads)
        finite = _all_finite(means["loss"], grad_norm, amaxes)
        halted = state.guard.halted | (~finite & (train.on_nonfinite is Nonfinite.stop))
        observed = jnp.stack([means["loss"], grad_norm]).astype(jnp.float32)
        # With a zero gradient nothing was learned, and weight decay and momentum alone would move the params.
        counts = finite & ~halted & (grad_norm > 0)
        apply = counts & ~_is_spike(state.guard, observed, train.spike)
        learning_rate = optimizer.schedule(state.step - state.guard.skipped)
        with jax.named_scope("update"):
            transform = optax.with_extra_args_support(optimizer.transform)
            old, old_params = layout.load(state.opt_state), layout.load_params(state.params)
            updates, opt_state = transform.update(grads, old, old_params, norm=grad_norm, learning_rate=learning_rate)
            params = apply_router_bias(optax.apply_updates(old_params, updates), old_params, aux)
            params = optimizer.restore_frozen(params, old_params)
            new = (params, opt_state, jax.tree.map(_push_amax, state.history, amaxes))
            params, opt_state, history = _select(apply, new, (old_params, old, state.history))
        new_state = dataclasses.replace(
            state,
            step=state.step + jnp.where(halted, 0, 1),
            params=layout.store_params(params),
            opt_state=layout.store(opt_state),
            guard=_observe(state.guard, observed, train.spike, counts=counts, apply=apply, halted=halted),
            history=history,
        )
        metrics = {**means, **layer_metrics(aux), "grad_norm": grad_norm, "learning_rate": learning_rate}
        counters = {"tokens": sums["weight"], "skipped": new_state.guard.skipped, "halted": new_state.guard.halted}
        if has_statistics:
            trees = {"grad": grads, "weight": old_params, "update": updates}
            counters[STATISTICS] = layout.replicate(reduce_step(trees, aux, is_applied=apply))
        return new_state, {**metrics, **counters, **_replicated_rows(row_values, layout)}

    return step


def _replicated_rows(row_values: Tree, layout: StateLayout) -> Metrics:
    """ROW_VALUES of a step, if there are any, as every process can read them."""
    return {ROW_VALUES: layout.replicate(row_values)} if row_values else {}


def _gradients(
    loss_fn: LossFn,
    trainable: tuple[Tree, Tree],
    batch: Batch,
    key: jax.Array,
    train: Train,
    optimizer: Optimizer,
    *,
    like: Tree,
) -> tuple[tuple[Tree, Tree], Sums]:
    """Gradient of sum(loss) over the whole batch, the amaxes of this step, and the sums.

    Micro-batches accumulate gradients of sums, to be divided once by the total weight, so that the result equals that
    of the whole batch even if their token counts differ. Gradients accumulate in optimizer.grad_dtype, or in the
    dtypes of `like`, the stored params; amaxes are combined by their maximum.
    """
    micro_batches, dtype = train.grad_accum, optimizer.grad_dtype

    def total_loss(trainable: tuple[Tree, Tree], batch: Batch, key: jax.Array) -> tuple[jax.Array, Sums]:
        sums = loss_fn(trainable, batch, key)
        return sums["loss"], sums

    gradient = jax.grad(total_loss, has_aux=True)
    if micro_batches == 1:
        (grads, amaxes), sums = gradient(trainable, batch, key)
        grads = grads if dtype is None else jax.tree.map(lambda x: x.astype(dtype), grads)
    else:
        parts, keys = split_microbatches(batch, micro_batches), jax.random.split(key, micro_batches)

        def accumulate(total: tuple[Tree, Sums], part: tuple[Batch, jax.Array]) -> tuple[tuple[Tree, Sums], Tree]:
            ((grads, amaxes), sums), ((part_grads, part_amaxes), part_sums) = total, gradient(trainable, *part)
            row_values = part_sums.pop(ROW_VALUES, {})
            grads = jax.tree.map(lambda total, x: total + x.astype(total.dtype), grads, part_grads)
            sums = jax.tree_util.tree_map_with_path(add_aux, sums, part_sums)
            return ((grads, jax.tree.map(jnp.maximum, amaxes, part_amaxes)), sums), row_values

        shapes = jax.eval_shape(gradient, trainable, jax.tree.map(lambda x: x[0], parts), keys[0])
        amaxes = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[0][1])
        summed = {name: shape for name, shape in shapes[1].items() if name != ROW_VALUES}
        sums = jax.tree_util.tree_map_with_path(_initial_sum, summed)
        zeros = ((jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype or leaf.dtype), like), amaxes), sums)
        ((grads, amaxes), sums), row_values = jax.lax.scan(accumulate, zeros, (parts, keys))
        sums = {**sums, ROW_VALUES: join_microbatches(row_values)}
    return (grads, amaxes), sums


def _initial_sum(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(leaf.shape, -jnp.inf if is_maximum(path[-1].key) else 0, leaf.dtype)


def _push_amax(history: jax.Array, amax: jax.Array) -> jax.Array:
    """Push this step's amax to the front of the history, and drop the oldest."""
    return jnp.concatenate([amax[..., :1], history[..., :-1]], axis=-1)


def _all_finite(loss: jax.Array, grad_norm: jax.Array, amaxes: Tree) -> jax.Array:
    """Whether loss, gradient norm and amaxes are finite: quantization clips, which would hide an overflow elsewhere."""
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    for amax in jax.tree.leaves(amaxes):
        finite &= jnp.all(jnp.isfinite(amax))
    return finite


def _nonzero_weight(sums: Sums) -> jax.Array:
    """The divisor of the sums; a batch without any weight has loss 0 and no gradient."""
    return jnp.where(sums["weight"] == 0, 1, sums["weight"])


def _select(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _is_spike(guard: Guard, observed: jax.Array, spike: Spike) -> jax.Array:
    """True if loss or gradient norm exceeds mean + sigmas * standard deviation, after the warm-up steps."""
    if spike.sigmas is None:
        return jnp.zeros((), jnp.bool_)
    return jnp.any(observed > _threshold(guard, spike.sigmas)) & (guard.seen >= spike.warmup_steps)


def _threshold(guard: Guard, sigmas: float) -> jax.Array:
    return guard.mean + sigmas * jnp.sqrt(guard.variance)


def _observe(
    guard: Guard, observed: jax.Array, spike: Spike, *, counts: jax.Array, apply: jax.Array, halted: jax.Array
) -> Guard:
    """Update the exponential mean and variance with a step that counts; over the first steps, a plain average.

    Spikes are clipped to the threshold before they enter the statistics: a single one changes them little, and a
    sustained jump, as when the data changes, raises the threshold until it is accepted. Skipping all of them forever
    would freeze the params, and the loss could never come down.
    """
    if spike.sigmas is not None:
        observed = jnp.where(apply, observed, jnp.minimum(observed, _threshold(guard, spike.sigmas)))
    keep = jnp.minimum(spike.decay, guard.seen / (guard.seen + 1.0))
    delta = observed - guard.mean
    return Guard(
        mean=jnp.where(counts, guard.mean + (1 - keep) * delta, guard.mean),
        variance=jnp.where(counts, keep * (guard.variance + (1 - keep) * jnp.square(delta)), guard.variance),
        seen=guard.seen + counts,
        skipped=guard.skipped + (~apply & ~halted),
        halted=halted,
    )
