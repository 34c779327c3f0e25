"""Pipeline parallelism: the repetitions of the pattern spread over the mesh axis `stage`.

Each stage holds the weights of its layers. The rows of a batch are cut into microbatches, which pass from stage to
stage in one scan over the ticks of the schedule (sharding/pipeline.py). The scan runs under shard_map over `stage`
alone; the compiler shards everything inside a stage over the other axes, and kernels under shard_map nest in it.

Outside the pipeline the rows of a batch are sharded over `stage` too. Three rings connect neighboring stages: the
residual stream moves to the next stage after every tick, input rows move from the stage that holds them toward the
first stage, and output rows from the last stage toward the stage that holds them. No stage ever holds all rows.

S stages, G groups of microbatches, m rows of a microbatch, T tokens, D residual stream, R repeats, C repetitions of a
chunk. The rows of a batch are B = O * S * I * G, O the shards of rows outside the axis `stage`, and m = O * I.
"""

import dataclasses
import math
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
from maxhydra.layers.statistics import reduce_aux
from maxhydra.model.pattern import Pattern, PatternOutput, Repetitions
from maxhydra.sharding import PipelineSchedule, Sharder, Work

Tree = Any


class _Rings(NamedTuple):
    """Values that move between stages, and the outputs that have arrived."""

    stream_mTD: jax.Array
    """Residual stream from the previous stage."""
    inputs_mTD: jax.Array
    outputs_mTD: jax.Array
    stored_GmTD: jax.Array
    """Output rows of this stage."""


def check_stages(repetitions: int, sharder: Sharder) -> None:
    """Raise ConfigError unless the repetitions of the pattern divide into the stages and repeats of the mesh."""
    stages, repeats = sharder.stages, sharder.options.repeats
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
    tokens = {"positions": ctx.positions, "segments": ctx.segments, "tokens": ctx.tokens, "shared": dict(ctx.shared)}
    cut = partial(_cut, schedule=schedule, outer=_outer_shards(sharder))
    stacked = repetitions._replace(layer_inputs=jax.tree.map(partial(cut, axis=2), repetitions.layer_inputs))
    without_tokens: dict[str, Any] = dict.fromkeys(tokens)
    stage = _Stage(
        pattern, dataclasses.replace(ctx, layer_input=None, expert_ids=None, **without_tokens), schedule, accum_dtype
    )
    by_stage, rows, whole = PartitionSpec(STAGE), PartitionSpec(None, STAGE), PartitionSpec()
    over_stages = jax.shard_map(
        stage.run,
        mesh=sharder.mesh,
        in_specs=(by_stage, by_stage, rows, whole, whole),
        out_specs=(rows, PartitionSpec(None, STAGE)),
        axis_names={STAGE},
        check_vma=False,
    )
    out_OSIGTD, (layer_outputs, aux) = over_stages(
        jnp.arange(schedule.stages), stacked, cut(x_BTD), jax.tree.map(cut, tokens), ctx.dropout_key
    )
    out_BTD = ctx.constrain_stream(out_OSIGTD.reshape(x_BTD.shape))
    layers = len(repetitions.number)
    layer_outputs, aux = jax.tree.map(lambda x: x.reshape(layers, *x.shape[3:]), (layer_outputs, aux))
    layer_outputs = [_join_rows(x, schedule, _outer_shards(sharder)) for x in layer_outputs]
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


def _outer_shards(sharder: Sharder) -> int:
    """Number of shards of the rows of a batch over the mesh axes before `stage`."""
    axes = sharder.mesh_axes("act_batch")
    return math.prod(sharder.mesh.shape[axis] for axis in (axes[: axes.index(STAGE)] if STAGE in axes else ()))


def _cut(x: jax.Array, schedule: PipelineSchedule, outer: int, axis: int = 0) -> jax.Array:
    """The row axis B as [O, S, I, G]: each device cuts the rows that it holds, so nothing moves."""
    shape = (outer, schedule.stages, x.shape[axis] // (outer * schedule.microbatches), schedule.groups)
    return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])


def _join_rows(x: jax.Array, schedule: PipelineSchedule, outer: int) -> jax.Array:
    """[repetitions, G, S, m, ...] to [repetitions, B, ...], the inverse of `_cut`."""
    layers, groups, stages, rows = x.shape[:4]
    x = x.reshape(layers, groups, stages, outer, rows // outer, *x.shape[4:])
    x = jnp.moveaxis(x, (3, 2, 4, 1), (1, 2, 3, 4))
    return x.reshape(layers, schedule.microbatches * rows, *x.shape[5:])


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The program of one stage."""

    pattern: Pattern
    ctx: Context
    """The context without what differs between microbatches."""
    schedule: PipelineSchedule
    accum_dtype: np.dtype

    def run(
        self, stage_1: jax.Array, stacked: Repetitions, rows_O1IGTD: jax.Array, tokens: Tree, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[list[jax.Array], list[Any]]]:
        """Output rows [O, 1, I, G, T, D]; layer outputs and aux outputs [R, 1, C, ...], these combined over rows."""
        schedule, stage = self.schedule, stage_1[0]
        ctx = dataclasses.replace(self.ctx, sharder=self.ctx.sharder.inside_stage())
        weights = [_Weights.of(weights, ctx.sharder, self.accum_dtype) for weights in stacked.weights]
        chunks = _RunningChunks.of(stacked._replace(weights=weights), schedule, stage)
        rows_GmTD = jnp.moveaxis(rows_O1IGTD[:, 0], 2, 0).reshape(schedule.groups, -1, *rows_O1IGTD.shape[4:])

        def tick(rings: _Rings, tick: jax.Array) -> tuple[_Rings, Any]:
            rings = self._load(rings, rows_GmTD, tick)
            work = self._work(tick, stage)
            is_first = (stage == 0) & (work.repeat == 0)
            x_mTD = jnp.where(is_first, rings.inputs_mTD, rings.stream_mTD)
            microbatch = jax.tree.map(partial(_rows_of, work=work), tokens)
            index = work.group * schedule.stages + work.owner
            dropout_key = None if key is None else jax.random.fold_in(key, index)
            layer_ctx = dataclasses.replace(ctx, **microbatch, dropout_key=dropout_key)
            out = self.pattern.scan(x_mTD, layer_ctx, [None] * len(self.pattern.runs), chunks.at(work))
            return self._rotate(rings, out.x_BTD, work, tick, stage), (out.layer_outputs, out.aux)

        # Idle ticks run on real rows: zeros could give NaN gradients.
        first_mTD = rows_GmTD[0]
        rings = _Rings(first_mTD, first_mTD, first_mTD, jnp.zeros_like(rows_GmTD))
        rings, (layer_outputs, aux) = jax.lax.scan(tick, rings, jnp.arange(schedule.ticks))
        O, _, I, *_ = rows_O1IGTD.shape
        out_OIGTD = jnp.moveaxis(rings.stored_GmTD.reshape(-1, O, I, *rings.stored_GmTD.shape[2:]), 0, 2)
        layer_outputs = jax.tree.map(lambda x: self._by_repeat(x, stage), layer_outputs)
        aux = reduce_aux(jax.tree.map(lambda x: self._by_repeat(x, stage), aux), axes=(3, 4))
        return out_OIGTD[:, None], (layer_outputs, aux)

    def _work(self, tick: jax.Array, stage: jax.Array) -> Work:
        """The work at a tick; at an idle one, any in range."""
        work = self.schedule.work(tick, stage)
        return work._replace(group=jnp.clip(work.group, 0, self.schedule.groups - 1))

    def _load(self, rings: _Rings, rows_GmTD: jax.Array, tick: jax.Array) -> _Rings:
        """At the first tick of a group, each stage puts its rows of the group on the ring of inputs."""
        group, index = divmod(tick, self.schedule.stages * self.schedule.repeats)
        own_mTD = rows_GmTD[jnp.minimum(group, self.schedule.groups - 1)]
        return rings._replace(inputs_mTD=jnp.where(index == 0, own_mTD, rings.inputs_mTD))

    def _rotate(self, rings: _Rings, x_mTD: jax.Array, work: Work, tick: jax.Array, stage: jax.Array) -> _Rings:
        """Send everything to the neighbors, and store the output rows of a group when all have arrived.

        The last stage puts the outputs of a group on the ring at successive ticks, that of owner 0 first. After the
        last of them each is at its owner.
        """
        S, R = self.schedule.stages, self.schedule.repeats
        is_last = (stage == S - 1) & (work.repeat == R - 1)
        outputs_mTD = jnp.where(is_last, x_mTD, rings.outputs_mTD)
        group, index = divmod(tick - 2 * (S - 1) - (R - 1) * S, S * R)
        slot = jnp.clip(group, 0, self.schedule.groups - 1)
        stored_mTD = jnp.where((index == 0) & (group >= 0), outputs_mTD, rings.stored_GmTD[slot])
        backward = [(s, s - 1) for s in range(1, S)]
        # With one chunk per stage nothing returns from the last stage to the first.
        forward = [(s, (s + 1) % S) for s in range(S if R > 1 else S - 1)]
        return _Rings(
            stream_mTD=jax.lax.ppermute(x_mTD, STAGE, forward),
            inputs_mTD=jax.lax.ppermute(rings.inputs_mTD, STAGE, backward),
            outputs_mTD=jax.lax.ppermute(outputs_mTD, STAGE, backward),
            stored_GmTD=jax.lax.dynamic_update_index_in_dim(rings.stored_GmTD, stored_mTD, slot, axis=0),
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
        return chunk._replace(
            weights=[weights.joined() for weights in chunk.weights],
            layer_inputs=jax.tree.map(partial(_rows_of, work=work, axis=2), chunk.layer_inputs),
        )


def _rows_of(x: jax.Array, work: Work, axis: int = 0) -> jax.Array:
    """The rows m of a microbatch, from [..., O, S, I, G, ...]."""
    x = jax.lax.dynamic_index_in_dim(x, work.group, axis + 3, keepdims=False)
    x = jax.lax.dynamic_index_in_dim(x, work.owner, axis + 1, keepdims=False)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


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
