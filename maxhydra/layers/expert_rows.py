"""The experts of one device: rows sorted by expert, multiplied in grouped matmuls, and summed by token.

A pair is a token with one of its experts. Pairs whose expert is on this device have a row; rows are sorted by expert.
Dropless (Gale et al., 2022): one grouped matmul serves any load of the experts.

B batch, T tokens of a sequence, M = B * T tokens, D residual stream, E experts, K experts per token, F hidden, R rows.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxhydra.kernels.grouped_matmul import row_copies
from maxhydra.kernels.placement import Placement
from maxhydra.layers.expert_mlp import ExpertsSpec, Weights, apply_experts
from maxhydra.layers.mlp import apply_activation, gated, limited
from maxhydra.layers.router import ROUTING


class RoutedTokens(NamedTuple):
    """Tokens with their experts and the weights of these."""

    x_BTD: jax.Array
    ids_BTK: jax.Array
    weights_BTK: jax.Array

    def flat(self) -> "Tokens":
        return Tokens(*(x.reshape(-1, x.shape[-1]) for x in self))


class Tokens(NamedTuple):
    """Routed tokens without a batch dimension."""

    x_MD: jax.Array
    ids_MK: jax.Array
    """Experts of each token; ids out of range belong to other devices or to padding."""
    weights_MK: jax.Array


class SharedExpert(NamedTuple):
    """The expert that every token uses, whose partial sums are added to those of the others."""

    gate_DF: jax.Array | None
    up_DF: jax.Array
    down_FD: jax.Array
    scale_BT1: jax.Array | None
    """Factor of the output."""

    def __call__(self, x_BTD: jax.Array, spec: ExpertsSpec) -> jax.Array:
        gate_BTF, up_BTF = (
            None if kernel_DF is None else checkpoint_name(jnp.einsum("BTD,DF->BTF", x_BTD, kernel_DF), name)
            for name, kernel_DF in (("mlp_gate", self.gate_DF), ("mlp_up", self.up_DF))
        )
        assert up_BTF is not None
        if gate_BTF is None:
            hidden_BTF = apply_activation(spec.activation, up_BTF)
        else:
            hidden_BTF = gated(spec.activation, *limited(gate_BTF, up_BTF, spec.limit))
        if self.scale_BT1 is not None:
            hidden_BTF = (hidden_BTF * self.scale_BT1).astype(hidden_BTF.dtype)
        return jnp.einsum("BTF,FD->BTD", hidden_BTF, self.down_FD)


@partial(jax.tree_util.register_dataclass, data_fields=["pairs_R", "rows_MK"], meta_fields=["is_complete"])
@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Which pair each row belongs to, and the reverse."""

    pairs_R: jax.Array
    """Index into the M * K pairs; arbitrary for rows that no pair refers to."""
    rows_MK: jax.Array
    """Row of each pair; R for pairs without a row."""
    is_complete: bool
    """Whether every pair has a row."""

    @property
    def tokens_R(self) -> jax.Array:
        return self.pairs_R // self.rows_MK.shape[1]

    def by_row(self, x_MD: jax.Array, platform: str) -> jax.Array:
        """[R, D] the token of each row."""
        if self.is_complete and row_copies.is_supported(x_MD, self.rows_MK.shape[1], platform):
            return row_copies.copy_to_rows(x_MD, self.rows_MK)
        return x_MD[self.tokens_R]

    def by_pair(self, values_R: jax.Array) -> jax.Array:
        """[M, K, ...] the values of the rows of each pair; zero for pairs without a row."""
        if self.is_complete:
            return values_R[self.rows_MK]
        return values_R.at[self.rows_MK].get(mode="fill", fill_value=0)


def dropless(weights: Weights, tokens: Tokens, spec: ExpertsSpec, place: Placement) -> jax.Array:
    """[M, D] in float32: weighted outputs of experts that are all on this device.

    The weight of a row scales the input of the down projection, so that the backward pass does not need its output.
    """
    order, sizes_E = sort_by_expert(tokens.ids_MK, spec.experts)
    weights_R = None if spec.scales_input else _by_row(tokens.weights_MK, order)
    rows_RD = rows_of(tokens, order, spec, place)
    out_RD = apply_experts(weights, rows_RD, sizes_E, spec, place, weights_R=weights_R)
    return _sum_rows(out_RD, order, place.platform)


def sort_by_expert(ids_MK: jax.Array, experts: int, rows: int | None = None) -> tuple[RowOrder, jax.Array]:
    """The rows of pairs in stable order by expert, and the number of rows of each expert.

    Pairs whose expert is out of range come last. `rows`: number of rows if these pairs have none. None: a row each.
    """
    ids_R = ids_MK.reshape(-1)
    ids_R = jnp.where((ids_R >= 0) & (ids_R < experts), ids_R, experts)
    pairs_R = _stable_argsort(ids_R, experts + 1)
    rows_R = jnp.zeros_like(pairs_R).at[pairs_R].set(jnp.arange(pairs_R.size, dtype=pairs_R.dtype), unique_indices=True)
    # Without the barrier XLA fuses the end of this sum into each of its readers, which take 38 us instead of 3.
    sizes_E = jax.lax.optimization_barrier(jnp.sum(ids_R[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32))
    if rows is not None:
        pairs_R = jnp.pad(pairs_R, (0, max(0, rows - pairs_R.size)))[:rows]
        rows_R = jnp.where(ids_R < experts, rows_R, rows)
    order = RowOrder(pairs_R, rows_R.reshape(ids_MK.shape), is_complete=rows is None)
    named: tuple[RowOrder, jax.Array] = jax.tree.map(partial(checkpoint_name, name=ROUTING), (order, sizes_E))
    return named


def _stable_argsort(ids_R: jax.Array, bound: int) -> jax.Array:
    """The stable order of ids below a bound, by sorting one array of ids with positions instead of two arrays."""
    R = ids_R.size
    if bound * R > jnp.iinfo(jnp.int32).max:
        return jnp.argsort(ids_R, stable=True)
    keys_R = ids_R.astype(jnp.int32) * R + jnp.arange(R, dtype=jnp.int32)
    return jax.lax.sort(keys_R, is_stable=False) % R


def rows_of(tokens: Tokens, order: RowOrder, spec: ExpertsSpec, place: Placement) -> jax.Array:
    """[R, D] input of the experts: the token of each row, times its weight if that scales the input."""
    rows_RD = _repeat(tokens.x_MD, order, place.platform)
    if not spec.scales_input:
        return rows_RD
    return (rows_RD * _by_row(tokens.weights_MK, order)[:, None]).astype(rows_RD.dtype)


def combine(out_RD: jax.Array, tokens: Tokens, order: RowOrder, spec: ExpertsSpec, place: Placement) -> jax.Array:
    """[M, D] in float32: the sum of each token's rows, by weight unless the weight scaled the input."""
    weights_MK = jnp.ones_like(tokens.weights_MK) if spec.scales_input else tokens.weights_MK
    return weighted_sum(out_RD, weights_MK, order, place.platform)


@jax.custom_vjp
def _by_row(weights_MK: jax.Array, order: RowOrder) -> jax.Array:
    """[R] the weight of each row; the gradient reads the rows of the pairs, where XLA would scatter and add."""
    return weights_MK.reshape(-1)[order.pairs_R]


def _by_row_forward(weights_MK: jax.Array, order: RowOrder) -> tuple[jax.Array, RowOrder]:
    return _by_row(weights_MK, order), order


def _by_row_backward(order: RowOrder, d_R: jax.Array) -> tuple[jax.Array, None]:
    return order.by_pair(d_R), None


_by_row.defvjp(_by_row_forward, _by_row_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _repeat(x_MD: jax.Array, order: RowOrder, platform: str) -> jax.Array:
    """[R, D] the token of each row.

    The gradient is a gather and a sum, which is faster than a scatter-add, and deterministic.
    """
    return order.by_row(x_MD, platform)


def _repeat_forward(x_MD: jax.Array, order: RowOrder, platform: str) -> tuple[jax.Array, RowOrder]:
    return _repeat(x_MD, order, platform), order


def _repeat_backward(platform: str, order: RowOrder, d_RD: jax.Array) -> tuple[jax.Array, None]:
    return jnp.sum(order.by_pair(d_RD), axis=1, dtype=jnp.float32).astype(d_RD.dtype), None


_repeat.defvjp(_repeat_forward, _repeat_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_rows(out_RD: jax.Array, order: RowOrder, platform: str) -> jax.Array:
    """[M, D] in float32: sum over each token's rows."""
    return jnp.sum(order.by_pair(out_RD), axis=1, dtype=jnp.float32)


def _sum_rows_forward(
    out_RD: jax.Array, order: RowOrder, platform: str
) -> tuple[jax.Array, tuple[jax.Array, RowOrder]]:
    return _sum_rows(out_RD, order, platform), (out_RD[:0], order)


def _sum_rows_backward(platform: str, saved: tuple[jax.Array, RowOrder], d_MD: jax.Array) -> tuple[jax.Array, None]:
    # The block adds the output to a stream of this dtype, so the cotangent has no more digits.
    empty_out, order = saved
    return order.by_row(d_MD.astype(empty_out.dtype), platform), None


_sum_rows.defvjp(_sum_rows_forward, _sum_rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def weighted_sum(out_RD: jax.Array, weights_MK: jax.Array, order: RowOrder, platform: str) -> jax.Array:
    """[M, D] in float32: sum over each token's rows. No array of the gradient is larger than the rows."""
    return jnp.einsum("MKD,MK->MD", order.by_pair(out_RD).astype(jnp.float32), weights_MK)


def _weighted_sum_forward(
    out_RD: jax.Array, weights_MK: jax.Array, order: RowOrder, platform: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, RowOrder]]:
    return weighted_sum(out_RD, weights_MK, order, platform), (out_RD, weights_MK, order)


def _weighted_sum_backward(
    platform: str, saved: tuple[jax.Array, jax.Array, RowOrder], d_MD: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    out_RD, weights_MK, order = saved
    # The block adds the output to a stream of this dtype, so the cotangent has no more digits.
    d_RD = order.by_row(d_MD.astype(out_RD.dtype), platform)
    weights_R1 = weights_MK.reshape(-1)[order.pairs_R][:, None]
    d_weights_R = jnp.sum(d_RD.astype(jnp.float32) * out_RD.astype(jnp.float32), axis=1)
    return (d_RD * weights_R1).astype(out_RD.dtype), order.by_pair(d_weights_R), None


weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)
