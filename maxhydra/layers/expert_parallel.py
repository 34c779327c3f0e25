"""Expert parallelism: tokens travel to the devices that hold their experts, and the outputs back.

Two ways, which give the same result: an all-to-all sends each row (a token for one of its experts) to one device; an
all-gather sends every token to all devices, and a reduce-scatter returns their sums. Both send the compute dtype in
both directions, and so do their gradients. The receive buffer of a device is bounded; all devices know all loads,
and what does not fit is dropped before it is sent.

D residual stream, E experts of a device, G experts of all devices that exchange tokens, K experts per token, L local
rows (M * K), M tokens of a device, N devices that exchange tokens, C rows of a device's buffer.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxhydra.config.schema import model as config
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.sharded_vjp import axes_of
from maxhydra.layers.context import Context
from maxhydra.layers.expert_mlp import ExpertsSpec, Weights, apply_experts
from maxhydra.layers.expert_rows import (
    RoutedTokens,
    RowOrder,
    SharedExpert,
    Tokens,
    combine,
    dropless,
    rows_of,
    sort_by_expert,
    weighted_sum,
)
from maxhydra.layers.low_rank import Factors
from maxhydra.layers.ragged_exchange import Link, Slices, exchange

# Rows of the buffers are a multiple of what the grouped matmul kernels take.
ROW_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class ExpertMesh:
    """How experts and tokens are split over the mesh."""

    spec: ExpertsSpec
    place: Placement
    holders: tuple[str, ...]
    """Mesh axes over which the experts are split."""
    exchanged: tuple[str, ...]
    """Those of the holders over which the tokens are split too."""
    hidden: tuple[str, ...]
    """Mesh axes over which the hidden dimension of each expert is split."""
    batch: Any
    length: Any
    """Entries of the PartitionSpec of tokens."""

    @classmethod
    def of(cls, spec: ExpertsSpec, ctx: Context) -> "ExpertMesh":
        sharder = ctx.sharder
        batch, length, hidden = sharder.spec(("act_batch", "act_length" if ctx.is_length_split else None, "act_mlp"))
        holders = sharder.mesh_axes("experts")
        hidden = tuple(axis for axis in axes_of(hidden) if axis not in holders)
        exchanged = tuple(axis for axis in holders if axis in (*axes_of(batch), *axes_of(length)))
        # With a cache a completion must not depend on the other sequences of its batch.
        parallel = spec.parallel if ctx.cache is None else dataclasses.replace(spec.parallel, buffer=None, chunks=1)
        spec = dataclasses.replace(spec, parallel=parallel)
        return cls(spec, ctx.place, holders, exchanged, hidden, batch, length)

    @property
    def is_scattered(self) -> bool:
        """Whether partial sums are scattered over the axes that split the residual stream: if it is these."""
        return bool(self.summed) and axes_of(self.place.stream_length) == (*axes_of(self.length), *self.summed)

    @property
    def adds_shared(self) -> bool:
        """Whether the shared expert is split like the others, so that one reduce-scatter serves both."""
        return self.is_scattered and self.summed == self.hidden

    @property
    def replicated(self) -> tuple[str, ...]:
        """Those of the holders that all have the same tokens."""
        return tuple(axis for axis in self.holders if axis not in self.exchanged)

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes over which the outputs of a token are partial sums."""
        return (*self.hidden, *self.replicated)

    def size(self, axes: tuple[str, ...]) -> int:
        assert self.place.mesh is not None
        return math.prod(self.place.mesh.shape[axis] for axis in axes)

    @property
    def devices(self) -> int:
        """Devices that exchange tokens."""
        return self.size(self.exchanged)

    @property
    def local_experts(self) -> int:
        return self.spec.experts // self.size(self.holders)

    @property
    def reachable_experts(self) -> int:
        """Experts of all devices that exchange tokens."""
        return self.local_experts * self.devices

    def most_rows(self, tokens: int, top_k: int) -> int:
        """The largest possible load of a device: all tokens choose as many of its experts as they can."""
        return self.devices * tokens * min(top_k, self.local_experts)

    def buffer_rows(self, tokens: int, top_k: int) -> int:
        """Rows of a device's receive buffer."""
        rows, buffer = self.most_rows(tokens, top_k), self.spec.parallel.buffer
        if buffer is not None:
            rows = min(rows, math.ceil(buffer * tokens * top_k / self.size(self.replicated)))
        return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE

    def gathers(self, top_k: int) -> bool:
        """Whether tokens are all-gathered: by `auto`, if that sends no more rows than an all-to-all."""
        dispatch, devices = self.spec.parallel.dispatch, self.devices
        if dispatch is config.Dispatch.auto or devices == 1:
            return devices - 1 <= top_k * (devices - 1) / devices
        return dispatch is config.Dispatch.all_gather

    def exchange_ids(self, ids_MK: jax.Array) -> jax.Array:
        """Ids among the reachable experts, in the order of their devices; -1 for all others."""
        if not self.replicated:
            return ids_MK
        blocks, shape = ids_MK // self.local_experts, [self.size((axis,)) for axis in self.holders]
        places = dict(zip(self.holders, jnp.unravel_index(blocks, shape), strict=True))
        is_reachable = jnp.all(
            jnp.stack([places[axis] == jax.lax.axis_index(axis) for axis in self.replicated]), axis=0
        )
        device = jnp.zeros_like(ids_MK)
        for axis in self.exchanged:
            device = device * self.size((axis,)) + places[axis]
        ids_MK = device * self.local_experts + ids_MK % self.local_experts
        return jnp.where(is_reachable, ids_MK, -1)


def expert_parallel(
    weights: Weights,
    routed: RoutedTokens,
    is_real_BT: jax.Array,
    mesh: ExpertMesh,
    ctx: Context,
    *,
    shared: SharedExpert | None,
) -> tuple[jax.Array, jax.Array | None]:
    """[B, T, D] weighted outputs, sharded as the residual stream, and [B, T, K], whether each was computed; None: all.

    Padding is not sent: it would fill the buffers, and its output is not used.
    """
    spec, place = mesh.spec, mesh.place

    def on_device(
        weights: Weights, shared: SharedExpert | None, routed: RoutedTokens, is_real_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        out_MD, is_sent_MK = _on_device(weights, routed.flat(), is_real_BT.reshape(-1, 1), mesh)
        out_BTD = out_MD.reshape(routed.x_BTD.shape)
        if shared is not None:
            out_BTD = out_BTD + shared(routed.x_BTD, spec)
        if mesh.is_scattered:
            out_BTD = jax.lax.psum_scatter(out_BTD, mesh.summed, scatter_dimension=1, tiled=True)
        elif mesh.summed:
            out_BTD = _replicated_sum(out_BTD, mesh.summed)
        return out_BTD, is_sent_MK.reshape(routed.ids_BTK.shape)

    in_specs, out_specs = _specs(mesh, weights, shared)
    out_BTD, is_sent_BTK = place.manual(on_device, in_specs, out_specs)(weights, shared, routed, is_real_BT)
    out_BTD = (out_BTD if mesh.is_scattered else ctx.to_stream(out_BTD)).astype(jnp.float32)
    return out_BTD, None if spec.parallel.buffer is None or not mesh.holders else is_sent_BTK


def _specs(mesh: ExpertMesh, weights: Weights, shared: SharedExpert | None) -> tuple[Any, Any]:
    """Shardings of weights, shared expert, tokens and mask, and of the outputs."""
    holders, hidden, along = mesh.holders, mesh.hidden, PartitionSpec(mesh.batch, mesh.length)
    into, out_of = PartitionSpec(holders, None, hidden), PartitionSpec(holders, hidden, None)
    is_gated = mesh.spec.is_gated
    bias = PartitionSpec(holders, hidden) if mesh.spec.has_bias else None
    of_shared = None
    if shared is not None:
        scale: Any = None if shared.scale_BT1 is None else along
        columns = PartitionSpec(None, hidden)
        of_shared = SharedExpert._make([columns if is_gated else None, columns, PartitionSpec(hidden), scale])
    out = PartitionSpec(mesh.batch, mesh.place.stream_length if mesh.is_scattered else mesh.length)
    whole = PartitionSpec(holders, None, None)
    updates = [
        None if update is None else Factors._make(specs)
        for update, specs in (
            (weights.gate_update, (whole, into)),
            (weights.up_update, (whole, into)),
            (weights.down_update, (out_of, whole)),
        )
    ]
    kernels = (into if is_gated else None, into, out_of)
    of_weights = Weights._make([*kernels, bias if is_gated else None, bias, *updates])
    return (of_weights, of_shared, along, along), (out, along)


def _on_device(
    weights: Weights, tokens: Tokens, is_real_M1: jax.Array, mesh: ExpertMesh
) -> tuple[jax.Array, jax.Array]:
    """Outputs [M, D] of a device's tokens, partial sums over `mesh.summed`, and [M, K], whether each was computed."""
    if not mesh.holders:
        out_MD = dropless(weights, tokens, mesh.spec, mesh.place)
        return out_MD.astype(mesh.spec.compute), jnp.ones(tokens.ids_MK.shape, bool)
    M, chunks = tokens.x_MD.shape[0], mesh.spec.parallel.chunks
    tokens = tokens._replace(ids_MK=jnp.where(is_real_M1, mesh.exchange_ids(tokens.ids_MK), -1))
    split = [jnp.split(x, chunks if M % chunks == 0 else 1) for x in tokens]
    parts = [_admit(Tokens(*arrays), mesh) for arrays in zip(*split, strict=True)]
    # All parts are dispatched before the first is computed, so that collectives can run behind its matmuls.
    dispatch = _gather if mesh.gathers(tokens.ids_MK.shape[1]) else _send
    finishes = [dispatch(part, mesh) for part in parts]
    out_MD = jnp.concatenate([finish(weights) for finish in finishes])
    is_sent_MK = jnp.concatenate([part.is_sent_MK for part in parts])
    if mesh.replicated:
        is_sent_MK = jax.lax.psum(is_sent_MK.astype(jnp.int32), mesh.replicated) > 0
    return out_MD.astype(mesh.spec.compute), is_sent_MK


class Admitted(NamedTuple):
    """Tokens of a device, and which of its rows fit in the buffers of the experts' devices."""

    tokens: Tokens
    order: RowOrder
    """Rows of the pairs, sorted by expert."""
    is_sent_MK: jax.Array
    """Whether the expert of a pair is reachable and the row fits in its buffer."""
    load_NNE: jax.Array
    """Rows from each device to each device's experts."""
    sent_NNE: jax.Array
    """How many of these are sent, the first ones."""
    buffer_rows: int


def _admit(tokens: Tokens, mesh: ExpertMesh) -> Admitted:
    """Decide what is dropped. Every device computes this for all devices, from the loads of their experts."""
    ids_MK, N = tokens.ids_MK, mesh.devices
    order, load_G = sort_by_expert(ids_MK, mesh.reachable_experts)
    load_NG = jax.lax.all_gather(load_G, mesh.exchanged) if mesh.exchanged else load_G[None]
    load_NNE = load_NG.reshape(N, N, -1)
    rows, most = mesh.buffer_rows(*ids_MK.shape), mesh.most_rows(*ids_MK.shape)
    if most <= rows:
        return Admitted(tokens, order, ids_MK >= 0, load_NNE, load_NNE, rows)
    sent_NNE = _sent_rows(load_NNE, rows)
    sent_G = sent_NNE[_index(mesh.exchanged)].reshape(-1)
    rank_MK = order.rows_MK - _starts(load_G)[ids_MK]
    return Admitted(tokens, order, (ids_MK >= 0) & (rank_MK < sent_G[ids_MK]), load_NNE, sent_NNE, rows)


def _sent_rows(load_NNE: jax.Array, rows: int) -> jax.Array:
    """How many rows of each queue, from a device to an expert, are sent to buffers of this many rows.

    All queues of a device have the same limit, the largest for which their rows fit. The rows left over go to the
    first queues that exceed it.
    """
    queues_NQ = jnp.swapaxes(load_NNE, 0, 1).reshape(load_NNE.shape[0], -1)
    sorted_NQ = jnp.sort(queues_NQ, axis=1)
    total_N1 = jnp.sum(queues_NQ, axis=1, keepdims=True)
    # With a limit between the lengths of two queues, all shorter ones are sent whole.
    shorter_NQ = jax.vmap(_starts)(sorted_NQ)
    limits_NQ = (rows - shorter_NQ) // jnp.arange(queues_NQ.shape[1], 0, -1)
    limit_N1 = jnp.where(total_N1 <= rows, sorted_NQ[:, -1:], jnp.max(limits_NQ, axis=1, keepdims=True))
    sent_NQ = jnp.minimum(queues_NQ, limit_N1)
    is_longer_NQ = queues_NQ > limit_N1
    spare_N1 = rows - jnp.sum(sent_NQ, axis=1, keepdims=True)
    sent_NQ = sent_NQ + (is_longer_NQ & (jnp.cumsum(is_longer_NQ, axis=1) <= spare_N1))
    return jnp.swapaxes(sent_NQ.reshape(load_NNE.shape), 0, 1)


Finish = Callable[[Weights], jax.Array]
"""Computes the dispatched tokens: the outputs [M, D] in float32."""


def _send(part: Admitted, mesh: ExpertMesh) -> Finish:
    """Dispatch by all-to-all: each row goes to the device of its expert, and its output comes back."""
    spec, me, (M, K) = mesh.spec, _index(mesh.exchanged), part.tokens.ids_MK.shape
    sent_NEN = jnp.transpose(part.sent_NNE, (1, 2, 0))
    # Rows arrive sorted by expert, those of one expert by the device that they come from.
    target_NEN = jax.vmap(_starts)(sent_NEN.reshape(mesh.devices, -1)).reshape(sent_NEN.shape)
    source_NNE = jax.vmap(_starts)(part.load_NNE.reshape(mesh.devices, -1)).reshape(part.load_NNE.shape)
    there = Slices(source_NNE[me], part.sent_NNE[me], target_NEN[:, :, me])
    back = Slices(target_NEN[me].T, part.sent_NNE[:, me], source_NNE[:, me])
    link = Link(mesh.exchanged, mesh.place.platform, slice_rows=M, sent=M * K, received=part.buffer_rows)
    rows_CD = exchange(rows_of(part.tokens, part.order, spec, mesh.place), there, back, link)
    sizes_E = jnp.sum(sent_NEN[me], axis=1)

    def finish(weights: Weights) -> jax.Array:
        out_CD = apply_experts(weights, rows_CD, sizes_E, spec, mesh.place)
        weights_MK = None if spec.scales_input else part.tokens.weights_MK
        return _return_sums(out_CD, weights_MK, part.order, (there, back), link)

    return finish


Saved = tuple[jax.Array, jax.Array | None, RowOrder, tuple[Slices, Slices]]
"""Outputs of the rows, weights of the pairs, and the slices that dispatched the rows and that return them."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _return_sums(
    out_CD: jax.Array, weights_MK: jax.Array | None, order: RowOrder, slices: tuple[Slices, Slices], link: Link
) -> jax.Array:
    """[M, D] in float32: return the rows to their tokens' devices, and sum them by weight; None: all weights are 1.

    The gradient of the weights is computed where the outputs are, so that recomputation does not return them again.
    """
    there, back = slices
    out_LD = exchange(out_CD, back, there, link.reversed())
    ones_MK = jnp.ones(order.rows_MK.shape)
    return weighted_sum(out_LD, ones_MK if weights_MK is None else weights_MK, order, link.platform)


def _return_sums_forward(
    out_CD: jax.Array, weights_MK: jax.Array | None, order: RowOrder, slices: tuple[Slices, Slices], link: Link
) -> tuple[jax.Array, Saved]:
    return _return_sums(out_CD, weights_MK, order, slices, link), (out_CD, weights_MK, order, slices)


def _return_sums_backward(link: Link, saved: Saved, d_MD: jax.Array) -> tuple[jax.Array, jax.Array | None, None, None]:
    out_CD, weights_MK, order, (there, back) = saved
    d_CD = exchange(order.by_row(d_MD.astype(out_CD.dtype), link.platform), there, back, link)
    if weights_MK is None:
        return d_CD, None, None, None
    weights_C1 = exchange(weights_MK.reshape(-1, 1)[order.pairs_R], there, back, link)
    d_weights_C1 = jnp.sum(d_CD.astype(jnp.float32) * out_CD.astype(jnp.float32), axis=1, keepdims=True)
    d_weights_L1 = exchange(d_weights_C1, back, there, link.reversed())
    return (d_CD * weights_C1).astype(out_CD.dtype), order.by_pair(d_weights_L1[:, 0]), None, None


_return_sums.defvjp(_return_sums_forward, _return_sums_backward)


def _gather(part: Admitted, mesh: ExpertMesh) -> Finish:
    """Dispatch by all-gather: every device gets all tokens, and sums the outputs of its own experts."""
    tokens = part.tokens._replace(ids_MK=jnp.where(part.is_sent_MK, part.tokens.ids_MK, -1))
    if mesh.exchanged:
        tokens = Tokens(*(jax.lax.all_gather(x, mesh.exchanged, tiled=True) for x in tokens))

    def finish(weights: Weights) -> jax.Array:
        E = mesh.local_experts
        local = tokens._replace(ids_MK=tokens.ids_MK - _index(mesh.exchanged) * E)
        order, sizes_E = sort_by_expert(local.ids_MK, E, part.buffer_rows)
        rows_RD = rows_of(local, order, mesh.spec, mesh.place)
        out_RD = apply_experts(weights, rows_RD, sizes_E, mesh.spec, mesh.place)
        out_MD = combine(out_RD, local, order, mesh.spec, mesh.place)
        if not mesh.exchanged:
            return out_MD
        scattered = out_MD.astype(mesh.spec.compute)
        return jax.lax.psum_scatter(scattered, mesh.exchanged, tiled=True).astype(jnp.float32)

    return finish


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _replicated_sum(x_BTD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over mesh axes as an output of shard_map that these axes do not split.

    The gradient of shard_map divides the cotangent of such an output by the size of the axes, and that of psum would
    all-reduce it. All devices have the same cotangent, so it is multiplied instead.
    """
    return jax.lax.psum(x_BTD, axes)


def _replicated_sum_forward(x_BTD: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return jax.lax.psum(x_BTD, axes), None


def _replicated_sum_backward(axes: tuple[str, ...], saved: None, d_BTD: jax.Array) -> tuple[jax.Array]:
    return (d_BTD * jax.lax.axis_size(axes),)


_replicated_sum.defvjp(_replicated_sum_forward, _replicated_sum_backward)


def _starts(sizes: jax.Array) -> jax.Array:
    """Where each of these consecutive slices begins."""
    return jnp.cumsum(sizes) - sizes


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    return jax.lax.axis_index(axes) if axes else 0
