"""Pipeline parallelism: the repetitions of the pattern spread over the mesh axis `stage`.

Each stage holds the weights of its layers. The rows of a batch are cut into microbatches, which pass from stage to
stage in one scan over the ticks of the schedule (sharding/pipeline.py). The scan runs under shard_map over `stage`
alone; the compiler shards everything inside a stage over the other axes, and kernels under shard_map nest in it.

Outside the pipeline the rows of a batch are sharded over `stage` too. Three rings connect neighboring stages: the
residual stream moves to the next stage after every tick, input rows move from the stage that holds them toward the
first stage, and output rows from the last stage toward the stage that holds them. No stage ever holds all rows.

S stages, G groups of microbatches, b rows of a microbatch, B = S * b * G rows, T tokens, D residual stream, R repeats,
C repetitions of a chunk.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import STAGE
from maxhydra.layers import Context
from maxhydra.layers.quant.training import AmaxHistory
from maxhydra.model.pattern import Pattern, PatternOutput, Repetitions
from maxhydra.sharding import PipelineSchedule, Sharder, Work

Tree = Any


class _Rings(NamedTuple):
    """Values that move between stages, and the outputs that have arrived."""

    stream_bTD: jax.Array
    """Residual stream from the previous stage."""
    inputs_bTD: jax.Array
    outputs_bTD: jax.Array
    stored_GbTD: jax.Array
    """Output rows of this stage."""


def check_stages(repetitions: int, sharder: Sharder) -> None:
    """Raise ConfigError unless the repetitions of the pattern divide into the stages and repeats of the mesh."""
    stages, repeats = sharder.stages, sharder.repeats
    if stages == 1 and repeats > 1:
        reason = "interleaves layers of pipeline stages, but mesh.stage=1"
        raise ConfigError(Problem("mesh.pipeline.repeats", reason, value=repeats, accepted="1, or mesh.stage > 1"))
    if stages == 1 or (repetitions and repetitions % (stages * repeats) == 0):
        return
    fits = [n for n in range(1, repetitions + 1) if repetitions % n == 0]
    reason = f"x mesh.pipeline.repeats={repeats} does not divide the {repetitions} repetitions of model.pattern"
    accepted = f"a product of {', '.join(map(str, fits))}" if fits else "1: the model has no repeated layers"
    hint = "move layers to model.prefix, which runs outside the pipeline, to change the number of repetitions"
    raise ConfigError(Problem("mesh.stage", reason, value=stages, accepted=accepted, hint=hint))


def run_pipeline(
    pattern: Pattern, x_BTD: jax.Array, ctx: Context, repetitions: Repetitions, *, accum_dtype: np.dtype
) -> PatternOutput:
    """Run all repetitions of the pattern over the stages of the mesh; without caches.

    Gradients of the weights are summed over microbatches in `accum_dtype` if theirs is narrower.
    """
    sharder = ctx.sharder
    _reject_amax_history(repetitions.weights)
    schedule = sharder.pipeline_schedule(x_BTD.shape[0])
    tokens = {"positions": ctx.positions, "segments": ctx.segments, "shared": dict(ctx.shared)}
    length = "act_length" if ctx.is_length_split else None
    rows_SbGTD = sharder.constrain(_cut(x_BTD, schedule), "layers", "act_batch", None, length, None)
    stacked = repetitions._replace(
        layer_inputs=jax.tree.map(partial(_cut, schedule=schedule, axis=2), repetitions.layer_inputs)
    )
    stage = _Stage(pattern, dataclasses.replace(ctx, layer_input=None, **dict.fromkeys(tokens)), schedule, accum_dtype)
    by_stage, whole = PartitionSpec(STAGE), PartitionSpec()
    over_stages = jax.shard_map(
        stage.run,
        mesh=sharder.mesh,
        in_specs=(by_stage, by_stage, by_stage, whole, whole),
        out_specs=(by_stage, PartitionSpec(None, STAGE)),
        axis_names={STAGE},
        check_vma=False,
    )
    split_tokens = jax.tree.map(partial(_cut, schedule=schedule), tokens)
    out_SbGTD, (layer_outputs, aux) = over_stages(
        jnp.arange(schedule.stages), stacked, rows_SbGTD, split_tokens, ctx.dropout_key
    )
    out_BTD = ctx.constrain(out_SbGTD.reshape(x_BTD.shape), "act_batch", "act_length", "act_embed")
    layers = len(repetitions.index)
    layer_outputs, aux = jax.tree.map(lambda x: x.reshape(layers, *x.shape[3:]), (layer_outputs, aux))
    # [repetitions, groups, owners, b, T, D] with the rows in the order of `_cut`.
    layer_outputs = [jnp.transpose(x, (0, 2, 3, 1, 4, 5)).reshape(layers, *x_BTD.shape) for x in layer_outputs]
    return PatternOutput(out_BTD, [None] * len(pattern.runs), layer_outputs, aux)


def shard_over_embed(weights: nnx.State, sharder: Sharder) -> nnx.State:
    """Weights of stacked layers with `stage` sharding their other axes instead of the layers.

    For decoding, which runs the layers one after the other on all devices: each is gathered when it is used, as with
    FSDP. A scan over layers that are sharded over stages would gather all of them at once.
    """

    def reshard(weight: nnx.Variable) -> nnx.Variable:
        axes = (None, *weight.get_metadata("axes")[1:])
        is_divisible = sharder.divides(axes, weight.shape)
        return weight.replace(sharder.constrain(weight[...], *axes)) if is_divisible else weight

    return jax.tree.map(reshard, weights, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _reject_amax_history(weights: list[nnx.State]) -> None:
    """Raise ConfigError for delayed scaling: the amaxes of microbatches would be added up instead of their maximum."""
    leaves = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, nnx.Variable))
    if any(isinstance(leaf, AmaxHistory) for leaf in leaves):
        reason = "delayed scaling does not support pipeline parallelism (mesh.stage > 1)"
        raise ConfigError(Problem("quantization.history", reason, value="set", accepted="null, or mesh.stage=1"))


def _cut(x: jax.Array, schedule: PipelineSchedule, axis: int = 0) -> jax.Array:
    """The row axis B as [S, b, G]: each device cuts the rows that it holds, so nothing moves."""
    shape = (schedule.stages, -1, schedule.groups)
    return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The program of one stage."""

    pattern: Pattern
    ctx: Context
    """The context without what differs between microbatches."""
    schedule: PipelineSchedule
    accum_dtype: np.dtype

    def run(
        self, stage_1: jax.Array, stacked: Repetitions, rows_1bGTD: jax.Array, tokens: Tree, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[list[jax.Array], list[Any]]]:
        """Output rows [1, b, G, T, D]; layer outputs and aux outputs [R, 1, C, ...], the latter summed over rows."""
        schedule, stage = self.schedule, stage_1[0]
        ctx = dataclasses.replace(self.ctx, sharder=self.ctx.sharder.inside_stage())
        weights = [_Weights.of(weights, ctx.sharder, self.accum_dtype) for weights in stacked.weights]
        chunks = _RunningChunks.of(stacked._replace(weights=weights), schedule, stage)
        rows_GbTD = jnp.swapaxes(rows_1bGTD[0], 0, 1)

        def tick(rings: _Rings, tick: jax.Array) -> tuple[_Rings, Any]:
            rings = self._load(rings, rows_GbTD, tick)
            work = self._work(tick, stage)
            is_first = (stage == 0) & (work.repeat == 0)
            x_bTD = jnp.where(is_first, rings.inputs_bTD, rings.stream_bTD)
            microbatch = jax.tree.map(lambda x: x[work.owner, :, work.group], tokens)
            index = work.group * schedule.stages + work.owner
            dropout_key = None if key is None else jax.random.fold_in(key, index)
            layer_ctx = dataclasses.replace(ctx, **microbatch, dropout_key=dropout_key)
            out = self.pattern.scan(x_bTD, layer_ctx, [None] * len(self.pattern.runs), chunks.at(work))
            return self._rotate(rings, out.x_BTD, work, tick, stage), (out.layer_outputs, out.aux)

        # Idle ticks run on real rows: zeros could give NaN gradients.
        first_bTD = rows_GbTD[0]
        rings = _Rings(first_bTD, first_bTD, first_bTD, jnp.zeros_like(rows_GbTD))
        rings, (layer_outputs, aux) = jax.lax.scan(tick, rings, jnp.arange(schedule.ticks))
        out_1bGTD = jnp.swapaxes(rings.stored_GbTD, 0, 1)[None]
        layer_outputs = jax.tree.map(lambda x: self._by_repeat(x, stage), layer_outputs)
        aux = jax.tree.map(lambda x: jnp.sum(self._by_repeat(x, stage), axis=(3, 4)), aux)
        return out_1bGTD, (layer_outputs, aux)

    def _work(self, tick: jax.Array, stage: jax.Array) -> Work:
        """The work at a tick; at an idle one, any in range."""
        work = self.schedule.work(tick, stage)
        return work._replace(group=jnp.clip(work.group, 0, self.schedule.groups - 1))

    def _load(self, rings: _Rings, rows_GbTD: jax.Array, tick: jax.Array) -> _Rings:
        """At the first tick of a group, each stage puts its rows of the group on the ring of inputs."""
        group, index = divmod(tick, self.schedule.stages * self.schedule.repeats)
        own_bTD = rows_GbTD[jnp.minimum(group, self.schedule.groups - 1)]
        return rings._replace(inputs_bTD=jnp.where(index == 0, own_bTD, rings.inputs_bTD))

    def _rotate(self, rings: _Rings, x_bTD: jax.Array, work: Work, tick: jax.Array, stage: jax.Array) -> _Rings:
        """Send everything to the neighbors, and store the output rows of a group when all have arrived.

        The last stage puts the outputs of a group on the ring at successive ticks, that of owner 0 first. After the
        last of them each is at its owner.
        """
        S, R = self.schedule.stages, self.schedule.repeats
        is_last = (stage == S - 1) & (work.repeat == R - 1)
        outputs_bTD = jnp.where(is_last, x_bTD, rings.outputs_bTD)
        group, index = divmod(tick - 2 * (S - 1) - (R - 1) * S, S * R)
        slot = jnp.clip(group, 0, self.schedule.groups - 1)
        stored_bTD = jnp.where((index == 0) & (group >= 0), outputs_bTD, rings.stored_GbTD[slot])
        backward = [(s, s - 1) for s in range(1, S)]
        # With one chunk per stage nothing returns from the last stage to the first.
        forward = [(s, (s + 1) % S) for s in range(S if R > 1 else S - 1)]
        return _Rings(
            stream_bTD=jax.lax.ppermute(x_bTD, STAGE, forward),
            inputs_bTD=jax.lax.ppermute(rings.inputs_bTD, STAGE, backward),
            outputs_bTD=jax.lax.ppermute(outputs_bTD, STAGE, backward),
            stored_GbTD=jax.lax.dynamic_update_index_in_dim(rings.stored_GbTD, stored_bTD, slot, axis=0),
        )

    def _by_repeat(self, x: jax.Array, stage: jax.Array) -> jax.Array:
        """[ticks, C, ...] to [R, 1, C, G, S, ...]: the ticks of each repeat and microbatch, without idle ones."""
        schedule = self.schedule
        shape = (schedule.repeats, schedule.groups, schedule.stages)
        repeat, group, owner = np.unravel_index(np.arange(np.prod(shape)), shape)
        picked = x[schedule.tick(Work(group, owner, repeat), stage)].reshape(*shape, *x.shape[1:])
        return jnp.moveaxis(picked, 3, 1)[:, None]


@dataclasses.dataclass(frozen=True)
class _RunningChunks:
    """The repetitions that a stage runs, [R, C, ...], with the chunk of each repeat at `order[repeat]`."""

    stacked: Repetitions
    order_R: jax.Array

    @classmethod
    def of(cls, stored: Repetitions, schedule: PipelineSchedule, stage: jax.Array) -> "_RunningChunks":
        """Exchange chunks between the stages that store them and those that run them."""
        R, S = schedule.repeats, schedule.stages
        chunks = jax.tree.map(lambda x: x.reshape(R, -1, *x.shape[1:]), stored)
        if R == 1:
            return cls(chunks, jnp.zeros(1, jnp.int32))
        order = np.zeros((S, R), np.int32)
        received = []
        for number, moves in enumerate(schedule.chunk_moves()):
            pairs = [(s, schedule.destination(s, index)) for s, (index, _) in enumerate(moves)]
            for (_, destination), (_, repeat) in zip(pairs, moves, strict=True):
                order[destination, repeat] = number
            index = jnp.asarray([index for index, _ in moves])[stage]
            received.append(jax.tree.map(partial(_send, index=index, pairs=pairs), chunks))
        return cls(jax.tree.map(lambda *x: jnp.stack(x), *received), jnp.asarray(order)[stage])

    def at(self, work: Work) -> Repetitions:
        """The repetitions of a chunk, with the per-layer embeddings of one microbatch."""
        number = 0 if len(self.order_R) == 1 else self.order_R[work.repeat]
        chunk: Repetitions = jax.tree.map(lambda x: x[number], self.stacked)
        inputs = chunk.layer_inputs
        return chunk._replace(
            weights=[weights.joined() for weights in chunk.weights],
            layer_inputs=None if inputs is None else inputs[:, :, work.owner, :, work.group],
        )


def _send(chunks: jax.Array, index: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    return jax.lax.ppermute(chunks[index], STAGE, pairs)


class _Weights(NamedTuple):
    """Weights of one position, with the arrays into which their gradients are summed over microbatches.

    The gradient of an array that a scan reads at every step is summed in its own dtype. Summing in bfloat16 would lose
    what the matmul of a whole batch keeps, so a weight in the compute dtype is read as a constant next to a slot in the
    wider dtype: zeros that no operation reads, which receive the gradient.
    """

    values: nnx.State
    slots: list[jax.Array | None]
    """One for each weight, in the order of the leaves; None for a weight that is not narrower."""

    @classmethod
    def of(cls, weights: nnx.State, sharder: Sharder, dtype: np.dtype) -> "_Weights":
        slots: list[jax.Array | None] = []

        def prepare(weight: nnx.Variable) -> nnx.Variable:
            axes = weight.get_metadata("axes")
            value = sharder.constrain(weight[...], *axes)
            is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < dtype.itemsize
            slots.append(sharder.constrain(_gradient_slot(value, dtype), *axes) if is_narrow else None)
            return weight.replace(jax.lax.stop_gradient(value) if is_narrow else value)

        values = jax.tree.map(prepare, weights, is_leaf=lambda node: isinstance(node, nnx.Variable))
        return cls(values, slots)

    def joined(self) -> nnx.State:
        """The weights, whose gradients go to their slots."""
        leaves, structure = jax.tree.flatten(self.values)
        joined = [x if slot is None else _join(x, slot) for x, slot in zip(leaves, self.slots, strict=True)]
        return jax.tree.unflatten(structure, joined)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gradient_slot(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Zeros in a wider dtype, whose gradient is that of x."""
    return jnp.zeros(x.shape, dtype)


def _gradient_slot_forward(x: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(x.shape, dtype), jnp.zeros((), x.dtype)


def _gradient_slot_backward(dtype: np.dtype, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    return (grad.astype(like.dtype),)


_gradient_slot.defvjp(_gradient_slot_forward, _gradient_slot_backward)


@jax.custom_vjp
def _join(x: jax.Array, slot: jax.Array) -> jax.Array:
    """x, whose gradient goes to the slot."""
    return x


def _join_forward(x: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.zeros((), slot.dtype)


def _join_backward(like: jax.Array, grad: jax.Array) -> tuple[None, jax.Array]:
    return None, grad.astype(like.dtype)


_join.defvjp(_join_forward, _join_backward)
