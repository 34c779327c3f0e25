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
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.grouped_matmul import grouped_matmul
from maxhydra.kernels.placement import Placement
from maxhydra.layers.context import KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.low_rank import Factors
from maxhydra.layers.mlp import ACTIVATIONS, apply_activation, gated, limited
from maxhydra.layers.params import Dtypes, residual_scale

# Multiples of the inputs and outputs that the grouped matmul kernels take, to which the rank of an adapter is padded.
RANK_MULTIPLES = {"gpu": 16, "tpu": 128}


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """Sizes and options of the experts, resolved from the config."""

    emb_dim: int
    """Width of inputs and outputs: that of the residual stream, or of its projection."""
    experts: int
    dim: int
    is_gated: bool
    activation: config.Activation
    has_bias: bool
    clamp: float | None
    clamp_slope: float
    limit: float | None
    scales_input: bool
    kernel: KernelChoice
    is_fused: bool
    """Whether a few tokens are decoded by the kernels of grouped_matmul/few_rows.py."""
    init_scale: float
    out_scale: float
    compute: np.dtype
    parallel: config.ExpertParallel = dataclasses.field(hash=False)

    @classmethod
    def of(cls, model: config.Model, moe: config.Moe) -> "ExpertsSpec":
        assert moe.experts is not None
        return cls(
            emb_dim=moe.latent_dim or model.emb_dim,
            experts=moe.experts,
            dim=moe.dim or model.mlp_dim,
            is_gated=moe.kind is config.MlpKind.gated,
            activation=moe.activation,
            has_bias=moe.bias,
            clamp=moe.clamp,
            clamp_slope=moe.clamp_slope,
            limit=moe.limit,
            scales_input=moe.router.scaled is config.Scaled.input,
            kernel=KernelChoice(model.kernels.grouped_matmul.value, model.kernels.sizes("grouped_matmul")),
            is_fused=model.kernels.fused_linear is config.FusedLinearBackend.auto,
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            compute=Dtypes.of(model.dtypes).compute,
            parallel=model.expert_parallel,
        )

    @property
    def matrices(self) -> int:
        """Matrices of an expert."""
        return 3 if self.is_gated else 2

    def hidden(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        """The input of the down projection: activation(gate) * up, activation(up) or the clamped SwiGLU of GPT-OSS."""
        if gate is None:
            return apply_activation(self.activation, up)
        if self.clamp is None:
            return gated(self.activation, *limited(gate, up, self.limit))
        return self.wide_hidden(gate, up).astype(gate.dtype)

    def wide_hidden(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        """`hidden` in float32."""
        if gate is None:
            return ACTIVATIONS[self.activation](up.astype(jnp.float32))
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        if self.clamp is None:
            gate, up = limited(gate, up, self.limit)
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, self.clamp), jnp.clip(up, -self.clamp, self.clamp)
        return (up + 1) * gate * jax.nn.sigmoid(self.clamp_slope * gate)


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


class Weights(NamedTuple):
    """Kernels, optional biases and LoRA updates of the experts; those of the gate are None for plain MLPs."""

    gate_EDF: jax.Array | None
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_EF: jax.Array | None
    up_EF: jax.Array | None
    gate_update: Factors | None = None
    up_update: Factors | None = None
    down_update: Factors | None = None


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
    weights_R = None if spec.scales_input else tokens.weights_MK.reshape(-1)[order.pairs_R]
    out_RD = apply_experts(weights, rows_of(tokens, order, spec), sizes_E, spec, place, weights_R=weights_R)
    return _sum_rows(out_RD, order)


def sort_by_expert(ids_MK: jax.Array, experts: int, rows: int | None = None) -> tuple[RowOrder, jax.Array]:
    """The rows of pairs in stable order by expert, and the number of rows of each expert.

    Pairs whose expert is out of range come last. `rows`: number of rows if these pairs have none. None: a row each.
    """
    ids_R = ids_MK.reshape(-1)
    ids_R = jnp.where((ids_R >= 0) & (ids_R < experts), ids_R, experts)
    pairs_R = _stable_argsort(ids_R, experts + 1)
    rows_R = jnp.zeros_like(pairs_R).at[pairs_R].set(jnp.arange(pairs_R.size, dtype=pairs_R.dtype), unique_indices=True)
    sizes_E = jnp.sum(ids_R[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    if rows is not None:
        pairs_R = jnp.pad(pairs_R, (0, max(0, rows - pairs_R.size)))[:rows]
        rows_R = jnp.where(ids_R < experts, rows_R, rows)
    return RowOrder(pairs_R, rows_R.reshape(ids_MK.shape), is_complete=rows is None), sizes_E


def _stable_argsort(ids_R: jax.Array, bound: int) -> jax.Array:
    """The stable order of ids below a bound, by sorting one array of ids with positions instead of two arrays."""
    R = ids_R.size
    if bound * R > jnp.iinfo(jnp.int32).max:
        return jnp.argsort(ids_R, stable=True)
    keys_R = ids_R.astype(jnp.int32) * R + jnp.arange(R, dtype=jnp.int32)
    return jax.lax.sort(keys_R, is_stable=False) % R


def rows_of(tokens: Tokens, order: RowOrder, spec: ExpertsSpec) -> jax.Array:
    """[R, D] input of the experts: the token of each row, times its weight if that scales the input."""
    rows_RD = _repeat(tokens.x_MD, order)
    if not spec.scales_input:
        return rows_RD
    return (rows_RD * tokens.weights_MK.reshape(-1)[order.pairs_R][:, None]).astype(rows_RD.dtype)


def apply_experts(
    weights: Weights,
    rows_RD: jax.Array,
    sizes_E: jax.Array,
    spec: ExpertsSpec,
    place: Placement,
    *,
    weights_R: jax.Array | None = None,
) -> jax.Array:
    """[R, D] output of each row's expert, without the down projection's bias. Rows after the last are unspecified.

    `weights_R`: factors of the rows.
    """
    matmul = partial(_grouped_matmul, sizes_E=sizes_E, kernel=spec.kernel, place=place)
    gate_RF = None if weights.gate_EDF is None else matmul(rows_RD, weights.gate_EDF, weights.gate_update)
    up_RF = matmul(rows_RD, weights.up_EDF, weights.up_update)
    if weights.up_EF is not None:
        ends_E, row_R1 = jnp.cumsum(sizes_E), jnp.arange(rows_RD.shape[0])[:, None]
        is_of_RE = (row_R1 >= ends_E - sizes_E) & (row_R1 < ends_E)
        if gate_RF is not None and weights.gate_EF is not None:
            gate_RF = _add_bias(gate_RF, weights.gate_EF, is_of_RE)
        up_RF = _add_bias(up_RF, weights.up_EF, is_of_RE)
    gate_RF = None if gate_RF is None else checkpoint_name(gate_RF, "mlp_gate")
    hidden_RF = spec.hidden(gate_RF, checkpoint_name(up_RF, "mlp_up"))
    if weights_R is not None:
        hidden_RF = (hidden_RF * weights_R[:, None]).astype(hidden_RF.dtype)
    return matmul(hidden_RF, weights.down_EFD, weights.down_update)


@jax.custom_vjp
def _add_bias(x_RF: jax.Array, bias_EF: jax.Array, is_of_RE: jax.Array) -> jax.Array:
    """Add the bias of each row's expert; zero for rows without one, whose x and gradient are unspecified.

    The gradient is a matmul: XLA would add rows one by one, with atomics that all write to the few rows of the bias.
    """
    bias_RF = bias_EF[jnp.argmax(is_of_RE, axis=1)]
    return jnp.where(jnp.any(is_of_RE, axis=1, keepdims=True), x_RF + bias_RF, 0)


def _add_bias_forward(
    x_RF: jax.Array, bias_EF: jax.Array, is_of_RE: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _add_bias(x_RF, bias_EF, is_of_RE), (bias_EF[:0], is_of_RE)


def _add_bias_backward(saved: tuple[jax.Array, jax.Array], d_RF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    empty_bias, is_of_RE = saved
    d_RF = jnp.where(jnp.any(is_of_RE, axis=1, keepdims=True), d_RF, 0)
    d_bias_EF = jnp.einsum("RE,RF->EF", is_of_RE.astype(d_RF.dtype), d_RF, preferred_element_type=jnp.float32)
    return d_RF, d_bias_EF.astype(empty_bias.dtype), None


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def combine(out_RD: jax.Array, tokens: Tokens, order: RowOrder, spec: ExpertsSpec) -> jax.Array:
    """[M, D] in float32: the sum of each token's rows, by weight unless the weight scaled the input."""
    weights_MK = jnp.ones_like(tokens.weights_MK) if spec.scales_input else tokens.weights_MK
    return weighted_sum(out_RD, weights_MK, order)


def _grouped_matmul(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    update: Factors | None,
    *,
    sizes_E: jax.Array,
    kernel: KernelChoice,
    place: Placement,
) -> jax.Array:
    """Rows times the kernel of their expert, plus its LoRA update by two smaller grouped matmuls."""
    run = partial(grouped_matmul, backend=kernel.backend, place=place)
    with kernel_errors_as_config_errors():
        out_RF = run(x_RD, w_EDF, sizes_E, sizes=kernel.sizes)
        if update is None:
            return out_RF
        # Tile sizes are for the kernels of the experts, not for the rank.
        a_EDr, b_ErF = update.padded(RANK_MULTIPLES.get(place.platform, 1))
        return out_RF + run(run(x_RD, a_EDr, sizes_E), b_ErF, sizes_E)


@jax.custom_vjp
def _repeat(x_MD: jax.Array, order: RowOrder) -> jax.Array:
    """[R, D] the token of each row.

    The gradient is a gather and a sum, which is faster than a scatter-add, and deterministic.
    """
    return x_MD[order.tokens_R]


def _repeat_forward(x_MD: jax.Array, order: RowOrder) -> tuple[jax.Array, RowOrder]:
    return _repeat(x_MD, order), order


def _repeat_backward(order: RowOrder, d_RD: jax.Array) -> tuple[jax.Array, None]:
    return jnp.sum(order.by_pair(d_RD), axis=1, dtype=jnp.float32).astype(d_RD.dtype), None


_repeat.defvjp(_repeat_forward, _repeat_backward)


@jax.custom_vjp
def _sum_rows(out_RD: jax.Array, order: RowOrder) -> jax.Array:
    """[M, D] in float32: sum over each token's rows."""
    return jnp.sum(order.by_pair(out_RD), axis=1, dtype=jnp.float32)


def _sum_rows_forward(out_RD: jax.Array, order: RowOrder) -> tuple[jax.Array, tuple[jax.Array, RowOrder]]:
    return _sum_rows(out_RD, order), (out_RD[:0], order)


def _sum_rows_backward(saved: tuple[jax.Array, RowOrder], d_MD: jax.Array) -> tuple[jax.Array, None]:
    # The block adds the output to a stream of this dtype, so the cotangent has no more digits.
    empty_out, order = saved
    return d_MD.astype(empty_out.dtype)[order.tokens_R], None


_sum_rows.defvjp(_sum_rows_forward, _sum_rows_backward)


@jax.custom_vjp
def weighted_sum(out_RD: jax.Array, weights_MK: jax.Array, order: RowOrder) -> jax.Array:
    """[M, D] in float32: sum over each token's rows. No array of the gradient is larger than the rows."""
    return jnp.einsum("MKD,MK->MD", order.by_pair(out_RD).astype(jnp.float32), weights_MK)


def _weighted_sum_forward(
    out_RD: jax.Array, weights_MK: jax.Array, order: RowOrder
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, RowOrder]]:
    return weighted_sum(out_RD, weights_MK, order), (out_RD, weights_MK, order)


def _weighted_sum_backward(
    saved: tuple[jax.Array, jax.Array, RowOrder], d_MD: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    out_RD, weights_MK, order = saved
    # The block adds the output to a stream of this dtype, so the cotangent has no more digits.
    d_RD = d_MD.astype(out_RD.dtype)[order.tokens_R]
    weights_R1 = weights_MK.reshape(-1)[order.pairs_R][:, None]
    d_weights_R = jnp.sum(d_RD.astype(jnp.float32) * out_RD.astype(jnp.float32), axis=1)
    return (d_RD * weights_R1).astype(out_RD.dtype), order.by_pair(d_weights_R), None


weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)
