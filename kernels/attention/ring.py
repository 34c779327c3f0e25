"""Ring attention (Liu et al., 2023): every device attends to the keys of all devices, one device's keys at a time.

The blocks of keys and values either travel around the ring of devices while the current one is computed, or are
gathered first. The results of the blocks are merged by their log-sum-exp. In the backward pass the gradients of a block
travel with it and end at the device that it belongs to.

Causal masks hide half of all blocks. With the zigzag order (Brandon et al., 2023) of 2n parts of the sequence, device i
holds parts i and 2n - 1 - i, and every device has the same work: of an earlier device's keys all queries see the first
half, of a later one's only the second half of the queries sees any, and sees all.

These functions run on each device, under shard_map. `step` counts the devices from a device back to the owner of a
block.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxhydra.kernels.attention.blocks import LOWEST, Inputs, Rows
from maxhydra.kernels.attention.partials import BlockKernel, Partial
from maxhydra.kernels.attention.spec import CHECKPOINT_NAME, Request
from maxhydra.kernels.placement import Entry


class KeyBlock(NamedTuple):
    """Keys, values and segments of one device."""

    k_BSKH: Any
    v_BSKH: Any
    segments_BS: Any


@dataclasses.dataclass(frozen=True)
class Ring:
    """Static parameters of attention over the devices along `axis`."""

    request: Request
    kernel: BlockKernel
    axis: Entry
    size: int
    half: int | None
    """Tokens of a part in zigzag order, of which a device has two; None: the order of the sequence."""
    is_gathered: bool
    """Blocks are all-gathered instead of travelling."""
    has_whole_keys: bool = False
    """Keys, values and their segments have a leading dimension: those of all devices; needs is_gathered."""

    def fold(self, visit: Callable[[Any, KeyBlock, Any], Any], carry: Any, own: KeyBlock) -> Any:
        """Fold `visit(step, block, carry)` over the blocks of the other devices."""
        if self.is_gathered:
            gathered = self._gather(own)

            def body(carry: Any, step: jax.Array) -> tuple[Any, None]:
                return visit(step, self._of_step(gathered, step), carry), None

            return jax.lax.scan(body, carry, jnp.arange(1, self.size))[0]

        def advance(state: tuple[Any, KeyBlock], step: jax.Array) -> tuple[tuple[Any, KeyBlock], None]:
            carry, block = state
            # Sent before it is used, so that the transfer overlaps with the computation.
            following = self._pass_on(block)
            return (visit(step, block, carry), following), None

        (carry, block), _ = jax.lax.scan(advance, (carry, self._pass_on(own)), jnp.arange(1, self.size - 1))
        return visit(jnp.int32(self.size - 1), block, carry)

    def fold_gradients(
        self, visit: Callable[[Any, KeyBlock, Any], tuple[Any, Any]], carry: Any, own: KeyBlock, d_own: Any
    ) -> tuple[Any, Any]:
        """`fold` of a visit that also returns gradients of its block; they are added to those of their own device."""
        if self.is_gathered:
            return self._fold_gathered_gradients(visit, carry, own, d_own)

        def compute(carry: Any, block: KeyBlock, total: Any, step: Any) -> tuple[Any, Any]:
            # The gradients from the device before are on their way while this device's are computed.
            arriving = self._pass_on(total)
            carry, new = visit(step, block, carry)
            return carry, jax.tree.map(jnp.add, arriving, new)

        def advance(state: Any, step: jax.Array) -> tuple[Any, None]:
            carry, block, total = state
            following = self._pass_on(block)
            carry, total = compute(carry, block, total, step)
            return (carry, following, total), None

        state = (carry, self._pass_on(own), d_own)
        (carry, block, total), _ = jax.lax.scan(advance, state, jnp.arange(1, self.size - 1))
        carry, total = compute(carry, block, total, jnp.int32(self.size - 1))
        return carry, self._pass_on(total)

    def _fold_gathered_gradients(self, visit: Any, carry: Any, own: KeyBlock, d_own: Any) -> tuple[Any, Any]:
        gathered, rank = self._gather(own), jax.lax.axis_index(self.axis)

        def body(state: tuple[Any, Any], step: jax.Array) -> tuple[tuple[Any, Any], None]:
            carry, totals = state
            carry, new = visit(step, self._of_step(gathered, step), carry)
            owner = (rank - step) % self.size
            return (carry, jax.tree.map(lambda total, part: total.at[owner].set(part), totals, new)), None

        totals = jax.tree.map(lambda part: jnp.zeros((self.size, *part.shape), part.dtype).at[rank].set(part), d_own)
        (carry, totals), _ = jax.lax.scan(body, (carry, totals), jnp.arange(1, self.size))
        if self.has_whole_keys:
            return carry, totals
        return carry, jax.tree.map(partial(jax.lax.psum_scatter, axis_name=self.axis), totals)

    def _pass_on(self, tree: Any) -> Any:
        pairs = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def _gather(self, own: KeyBlock) -> Any:
        return own if self.has_whole_keys else jax.tree.map(lambda x: jax.lax.all_gather(x, self.axis), own)

    def _of_step(self, blocks: Any, step: Any) -> Any:
        owner = (jax.lax.axis_index(self.axis) - step) % self.size
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, owner, keepdims=False), blocks)

    def own_block(self, inputs: Inputs) -> KeyBlock:
        """The keys of this device."""
        return self._of_step(blocks(inputs), 0) if self.has_whole_keys else blocks(inputs)

    def parts(self, step: Any, visit: Callable[[slice, slice], Any], skip: Callable[[], Any]) -> Any:
        """`visit(queries, keys)` of the part of a block that is visible, all of which is; `skip()` if there is none."""
        if not self.request.causal:
            return visit(slice(None), slice(None))
        is_earlier = jax.lax.axis_index(self.axis) >= step
        half = self.half
        if half is None:
            return jax.lax.cond(is_earlier, lambda: visit(slice(None), slice(None)), skip)
        of_earlier, of_later = (slice(None), slice(0, half)), (slice(half, None), slice(None))
        return jax.lax.cond(is_earlier, lambda: visit(*of_earlier), lambda: visit(*of_later))


def blocks(inputs: Inputs) -> KeyBlock:
    return KeyBlock(inputs.k_BSKH, inputs.v_BSKH, inputs.kv_segments_BS)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(ring: Ring, inputs: Inputs) -> jax.Array:
    """Attention of a device's queries to the keys of all devices."""
    return _forward(ring, inputs)[0]


def _forward(ring: Ring, inputs: Inputs) -> tuple[jax.Array, tuple[Inputs, jax.Array, jax.Array]]:
    whole = dataclasses.replace(ring.request, causal=False)

    def visit(step: Any, block: KeyBlock, total: Partial) -> Partial:
        def compute(queries: slice, keys: slice) -> Partial:
            part = Partial(*ring.kernel.forward(whole, _select(inputs, block, queries, keys)))
            return _behind(part, queries.start or 0)

        return total.merge(ring.parts(step, compute, lambda: _nothing(inputs)))

    own = ring.own_block(inputs)
    part = Partial(*ring.kernel.forward(ring.request, _select(inputs, own, slice(None), slice(None))))
    total = ring.fold(visit, Partial.empty(inputs).merge(part), blocks(inputs))
    out_BTNV, total_BNT = checkpoint_name(
        (total.out_BTNV.astype(inputs.q_BTNH.dtype), total.total_BNT), CHECKPOINT_NAME
    )
    return out_BTNV, (inputs, out_BTNV, total_BNT)


def _backward(ring: Ring, residuals: tuple[Inputs, jax.Array, jax.Array], d_out_BTNV: jax.Array) -> tuple[Inputs]:
    inputs, out_BTNV, total_BNT = residuals
    rows, whole = Rows.of(out_BTNV, total_BNT, d_out_BTNV), dataclasses.replace(ring.request, causal=False)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (inputs.q_BTNH, *ring.own_block(inputs)[:2])]

    def gradients(request: Request, block: KeyBlock, queries: slice, keys: slice) -> tuple[jax.Array, ...]:
        of_rows = Rows(rows.d_out_BTNH[:, queries], rows.total_BNT[:, :, queries], rows.mean_BNT[:, :, queries])
        found = ring.kernel.backward(request, _select(inputs, block, queries, keys), of_rows)
        starts = (queries.start or 0, keys.start or 0, keys.start or 0)
        return tuple(_placed(x, start, shape) for x, start, shape in zip(found, starts, shapes, strict=True))

    def visit(step: Any, block: KeyBlock, d_q_BTNH: jax.Array) -> tuple[jax.Array, Any]:
        new, *d_block = ring.parts(step, partial(gradients, whole, block), lambda: tuple(map(_zeros, shapes)))
        return d_q_BTNH + new, d_block

    everything = (slice(None), slice(None))
    d_q_BTNH, *d_own = gradients(ring.request, ring.own_block(inputs), *everything)
    d_q_BTNH, d_keys_values = ring.fold_gradients(visit, d_q_BTNH, blocks(inputs), d_own)
    arrays = zip((d_q_BTNH, *d_keys_values), inputs[:3], strict=True)
    d_q, d_k, d_v = (gradient.astype(x.dtype) for gradient, x in arrays)
    return (Inputs(d_q, d_k, d_v, rows.d_sinks(inputs), None, None),)


attend.defvjp(_forward, _backward)


def _select(inputs: Inputs, block: KeyBlock, queries: slice, keys: slice) -> Inputs:
    """Some of the queries, and some of the keys of a block, without sinks."""
    k_BSKH, v_BSKH, kv_segments_BS = (None if x is None else x[:, keys] for x in block)
    q_segments_BT = None if inputs.q_segments_BT is None else inputs.q_segments_BT[:, queries]
    return Inputs(inputs.q_BTNH[:, queries], k_BSKH, v_BSKH, None, q_segments_BT, kv_segments_BS)


def _behind(part: Partial, skipped: int) -> Partial:
    """The part of the queries behind the first `skipped`, as one of all queries."""
    out_BTNV, total_BNT = (x.astype(jnp.float32) for x in part)
    out_BTNV = jnp.pad(out_BTNV, ((0, 0), (skipped, 0), (0, 0), (0, 0)))
    return Partial(out_BTNV, jnp.pad(total_BNT, ((0, 0), (0, 0), (skipped, 0)), constant_values=LOWEST))


def _nothing(inputs: Inputs) -> Partial:
    return Partial.empty(inputs._replace(sinks_N=None))


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _placed(x: jax.Array, start: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Tokens from `start` in an array of all tokens, zeros elsewhere."""
    after = like.shape[1] - start - x.shape[1]
    return jnp.pad(x.astype(like.dtype), ((0, 0), (start, after), (0, 0), (0, 0)))


def to_zigzag(x_BT: jax.Array, axis: Entry, size: int) -> jax.Array:
    """Exchange parts of the sequence, two of which each device holds, into zigzag order.

    Of the parts that belong to a device one has an even number and comes from the first half of its owner's tokens.
    """
    even, odd = (
        jax.lax.ppermute(part, axis, [(i, _home(2 * i + offset, size)) for i in range(size)])
        for offset, part in enumerate(jnp.split(x_BT, 2, axis=1))
    )
    return jnp.concatenate(_ordered(even, odd, axis), axis=1)


def from_zigzag(x_BT: jax.Array, axis: Entry, size: int) -> jax.Array:
    """The inverse of `to_zigzag`."""
    low, high = jnp.split(x_BT, 2, axis=1)
    parts = [
        jax.lax.ppermute(part, axis, [(_home(2 * i + offset, size), i) for i in range(size)])
        for offset, part in enumerate(_ordered(low, high, axis))
    ]
    return jnp.concatenate(parts, axis=1)


def zigzag_blocks(x_BS: jax.Array, size: int) -> jax.Array:
    """[B, S, ...] to the tokens of each device in zigzag order, [size, B, S / size, ...]."""
    parts = x_BS.reshape(x_BS.shape[0], 2 * size, -1, *x_BS.shape[2:])
    return jnp.stack([jnp.concatenate([parts[:, i], parts[:, 2 * size - 1 - i]], axis=1) for i in range(size)])


def _home(part: int, size: int) -> int:
    """The device that holds a part in zigzag order."""
    return min(part, 2 * size - 1 - part)


def _ordered(first: jax.Array, second: jax.Array, axis: Entry) -> tuple[jax.Array, jax.Array]:
    """The two parts of a device, swapped on devices of odd number."""
    is_even = jax.lax.axis_index(axis) % 2 == 0
    return jnp.where(is_even, first, second), jnp.where(is_even, second, first)
