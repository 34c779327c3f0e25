"""The experts of a mixture, and the dispatch of tokens to them.

Dropless (Gale et al., 2022): rows are sorted by expert and multiplied in one grouped matmul, for any load. With expert
parallelism each device holds some of the experts, gathers the tokens of the devices that hold the others, and sums the
outputs of its own experts. With a capacity (Lepikhin et al., 2021): each expert has a fixed number of slots per
sequence, and matmuls are batched ones.

B batch, T tokens, D residual stream, E experts, K experts per token, F hidden, M = B * T tokens, R = M * K rows, C
slots of an expert.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.kernels.grouped_matmul import grouped_matmul
from maxhydra.kernels.placement import Placement
from maxhydra.layers.context import Context, KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.mlp import gated
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.quant.int4 import Int4
from maxhydra.layers.quant.int8 import Int8
from maxhydra.layers.quant.training import is_qat, rounding, straight_through


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """Sizes and options of the experts, resolved from the config."""

    emb_dim: int
    experts: int
    dim: int
    activation: config.Activation
    has_bias: bool
    clamp: float | None
    clamp_slope: float
    scales_input: bool
    kernel: KernelChoice
    init_scale: float
    out_scale: float
    compute: np.dtype

    @classmethod
    def of(cls, model: config.Model, moe: config.Moe) -> "ExpertsSpec":
        assert moe.experts is not None
        return cls(
            emb_dim=model.emb_dim,
            experts=moe.experts,
            dim=moe.dim or model.mlp_dim,
            activation=moe.activation,
            has_bias=moe.bias,
            clamp=moe.clamp,
            clamp_slope=moe.clamp_slope,
            scales_input=moe.router.scaled is config.Scaled.input,
            kernel=KernelChoice(model.kernels.grouped_matmul.value, model.kernels.sizes("grouped_matmul")),
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            compute=Dtypes.of(model.dtypes).compute,
        )

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The input of the down projection: activation(gate) * up, or the clamped SwiGLU of GPT-OSS."""
        if self.clamp is None:
            return gated(self.activation, gate, up)
        wide_gate = jnp.minimum(gate.astype(jnp.float32), self.clamp)
        wide_up = jnp.clip(up.astype(jnp.float32), -self.clamp, self.clamp)
        return ((wide_up + 1) * wide_gate * jax.nn.sigmoid(self.clamp_slope * wide_gate)).astype(gate.dtype)


class ExpertLinear(nnx.Module):
    """One linear projection of every expert."""

    def __init__(self, name: str, shape: tuple[int, int], axes: tuple[str, str], *, spec: ExpertsSpec, make: Any):
        scale = spec.out_scale if name == "down" else spec.init_scale
        self.name, self.format = make.named(name)
        if self.format is not None and self.format.rounds_inputs:
            reason = f"{self.name} is a projection of experts, whose inputs cannot be quantized"
            hint = f"+quantization.overrides.experts={{kind: {self.format.kind.value}, targets: [{self.name}]}}"
            raise ConfigError(Problem("quantization.activations", reason, value="int8", accepted="compute", hint=hint))
        self.compute = spec.compute
        self.kernel = make.experts(name, spec.experts, shape, axes, std=scale * shape[0] ** -0.5)
        self.bias = make.zeros((spec.experts, shape[1]), ("experts", axes[1])) if spec.has_bias else None

    @property
    def weight(self) -> jax.Array:
        """[E, inputs, outputs]. Quantized kernels are dequantized on every call, which saves memory, not time."""
        if isinstance(self.kernel, Int8):
            return self.kernel.unpacked(self.compute)
        if isinstance(self.kernel, Int4):
            return self.kernel.unpacked(self.kernel.parts, self.compute)
        if self.format is not None and is_qat(self.format):
            return straight_through(rounding(self.format, inputs=1, leading=1, name=self.name), self.kernel[...])
        return self.kernel[...]


class RoutedTokens(NamedTuple):
    """Tokens with their experts and the weights of these."""

    x_BTD: jax.Array
    ids_BTK: jax.Array
    weights_BTK: jax.Array


class Weights(NamedTuple):
    """Kernels and optional biases of the experts."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_EF: jax.Array | None
    up_EF: jax.Array | None


class Experts(nnx.Module):
    """Weighted sum over each token's experts of down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: ExpertsSpec, make: ParamBuilder):
        self.spec = spec
        D, F = spec.emb_dim, spec.dim
        self.gate = ExpertLinear("gate", (D, F), ("embed", "mlp"), spec=spec, make=make)
        self.up = ExpertLinear("up", (D, F), ("embed", "mlp"), spec=spec, make=make)
        self.down = ExpertLinear("down", (F, D), ("mlp", "embed"), spec=spec, make=make)

    def __call__(
        self, routed: RoutedTokens, ctx: Context, *, capacity: int | None, is_real_BT: jax.Array | None
    ) -> jax.Array:
        """[B, T, D] in float32. `capacity`: slots of an expert per sequence, which padding does not use."""
        if capacity is not None:
            slots_BTK = _slots(routed.ids_BTK, is_real_BT, self.spec.experts)
            fits_BTK = slots_BTK < capacity
            routed = routed._replace(weights_BTK=jnp.where(fits_BTK, routed.weights_BTK, 0))
            out_BTD = self._with_capacity(routed, jnp.where(fits_BTK, slots_BTK, capacity), ctx, capacity=capacity)
        elif ctx.sharder.mesh.size == 1:
            out_BTD = _dropless(self._weights(), routed, self.spec, ctx.place)
        else:
            out_BTD = self._expert_parallel(routed, ctx)
        if self.down.bias is None:
            return out_BTD
        is_routed_BTKE = routed.ids_BTK[..., None] == jnp.arange(self.spec.experts)
        weights_BTE = jnp.sum(jnp.where(is_routed_BTKE, routed.weights_BTK[..., None], 0), axis=2)
        return out_BTD + jnp.einsum("BTE,ED->BTD", weights_BTE, self.down.bias[...].astype(jnp.float32))

    def _weights(self) -> Weights:
        biases = [None if linear.bias is None else linear.bias[...] for linear in (self.gate, self.up)]
        return Weights(self.gate.weight, self.up.weight, self.down.weight, *biases)

    def _expert_parallel(self, routed: RoutedTokens, ctx: Context) -> jax.Array:
        """All-gather tokens to the devices that hold their experts, and reduce-scatter the outputs."""
        sharder, place = ctx.sharder, ctx.place
        length = "act_length" if ctx.is_length_split else None
        batch, along, hidden = sharder.spec(("act_batch", length, "act_mlp"))
        holders = sharder.mesh_axes("experts")
        tokens = PartitionSpec(batch, along, None)
        into, out_of = PartitionSpec(holders, None, hidden), PartitionSpec(holders, hidden, None)
        bias = PartitionSpec(holders, hidden) if self.spec.has_bias else None
        split = {0: _axes(batch), 1: _axes(along)}

        def on_device(weights: Weights, routed: RoutedTokens) -> jax.Array:
            gathers = [(axis, dim) for axis in holders for dim, axes in split.items() if axis in axes]
            for axis, dim in reversed(gathers):
                routed = RoutedTokens(*(jax.lax.all_gather(x, axis, axis=dim, tiled=True) for x in routed))
            first = jax.lax.axis_index(holders) * weights.gate_EDF.shape[0] if holders else 0
            out_BTD = _dropless(weights, routed._replace(ids_BTK=routed.ids_BTK - first), self.spec, place)
            out_BTD = jax.lax.psum(out_BTD, _axes(hidden)) if hidden else out_BTD
            for axis, dim in gathers:
                out_BTD = jax.lax.psum_scatter(out_BTD, axis, scatter_dimension=dim, tiled=True)
            rest = [axis for axis in holders if axis not in dict(gathers)]
            return jax.lax.psum(out_BTD, rest) if rest else out_BTD

        specs: Any = (Weights._make([into, into, out_of, bias, bias]), tokens)
        run = jax.shard_map(on_device, mesh=sharder.mesh, in_specs=specs, out_specs=tokens, check_vma=False)
        return run(self._weights(), routed)

    def _with_capacity(self, routed: RoutedTokens, slots_BTK: jax.Array, ctx: Context, *, capacity: int) -> jax.Array:
        """Batched matmuls over a fixed number of slots per expert and sequence; slot index `capacity` is dropped."""
        (B, T, D), E, C = routed.x_BTD.shape, self.spec.experts, capacity
        shape = (E, B, C)
        rows_B1 = jnp.arange(B)[:, None]
        token_BR = jnp.broadcast_to(jnp.arange(T)[:, None], routed.ids_BTK.shape[1:]).reshape(1, -1)
        ids_BR, slots_BR = routed.ids_BTK.reshape(B, -1), slots_BTK.reshape(B, -1)
        index = (ids_BR, rows_B1, slots_BR)
        # Token in each slot, T (a zero row) for an empty one; a slot past the last is dropped.
        token_EBC = jnp.full(shape, T).at[index].set(token_BR, mode="drop")
        x_BTD = jnp.pad(routed.x_BTD, ((0, 0), (0, 1), (0, 0)))
        x_EBCD = x_BTD[jnp.arange(B)[None, :, None], token_EBC]
        if self.spec.scales_input:
            weight_EBC = jnp.zeros(shape).at[index].set(routed.weights_BTK.reshape(B, -1), mode="drop")
            x_EBCD = (x_EBCD * weight_EBC[..., None]).astype(x_EBCD.dtype)
        x_EBCD = ctx.sharder.constrain(x_EBCD, "act_experts", "act_batch", None, "act_embed")
        hidden_EBCF = self.spec.hidden(*(self._project(linear, x_EBCD, ctx) for linear in (self.gate, self.up)))
        out_EBCD = jnp.einsum("EBCF,EFD->EBCD", hidden_EBCF, self.down.weight)
        out_EBCD = ctx.sharder.constrain(out_EBCD, "act_experts", "act_batch", None, "act_embed")
        out_BTKD = out_EBCD[ids_BR, rows_B1, jnp.minimum(slots_BR, C - 1)].reshape(B, T, -1, D)
        fits_BTK = slots_BTK < C
        weights_BTK = fits_BTK.astype(jnp.float32) if self.spec.scales_input else routed.weights_BTK
        return jnp.einsum("BTKD,BTK->BTD", out_BTKD.astype(jnp.float32), weights_BTK)

    def _project(self, linear: ExpertLinear, x_EBCD: jax.Array, ctx: Context) -> jax.Array:
        out_EBCF = jnp.einsum("EBCD,EDF->EBCF", x_EBCD, linear.weight)
        if linear.bias is not None:
            out_EBCF = out_EBCF + linear.bias[...][:, None, None]
        return ctx.sharder.constrain(out_EBCF, "act_experts", "act_batch", None, "act_mlp")


def _dropless(weights: Weights, routed: RoutedTokens, spec: ExpertsSpec, place: Placement) -> jax.Array:
    """[B, T, D] in float32: weighted outputs of these experts; ids out of range belong to other devices.

    Rows of other devices come last, in no group. What the grouped matmul leaves there is masked, before and after it.
    """
    (B, T, D), E, K = routed.x_BTD.shape, weights.gate_EDF.shape[0], routed.ids_BTK.shape[-1]
    is_whole = spec.experts == E
    ids_R = routed.ids_BTK.reshape(-1)
    ids_R = ids_R if is_whole else jnp.where((ids_R >= 0) & (ids_R < E), ids_R, E)
    order_R = jnp.argsort(ids_R, stable=True)
    inverse_R = jnp.argsort(order_R)
    sizes_E = jnp.sum(ids_R[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    weights_R = routed.weights_BTK.reshape(-1)
    rows_RD = _repeat_sorted(routed.x_BTD.reshape(B * T, D), order_R, inverse_R, K)
    is_local_R1 = (jnp.arange(B * T * K) < jnp.sum(sizes_E))[:, None]
    if not is_whole:
        rows_RD = jnp.where(is_local_R1, rows_RD, 0)
    if spec.scales_input:
        rows_RD = (rows_RD * weights_R[order_R][:, None]).astype(rows_RD.dtype)
    matmul = partial(_grouped_matmul, sizes_E=sizes_E, kernel=spec.kernel, place=place)
    gate_RF, up_RF = (matmul(rows_RD, kernel_EDF) for kernel_EDF in (weights.gate_EDF, weights.up_EDF))
    if weights.gate_EF is not None and weights.up_EF is not None:
        group_R = ids_R[order_R]
        gate_RF, up_RF = (x + bias_EF[group_R] for x, bias_EF in ((gate_RF, weights.gate_EF), (up_RF, weights.up_EF)))
    gate_RF, up_RF = checkpoint_name(gate_RF, "mlp_gate"), checkpoint_name(up_RF, "mlp_up")
    out_RD = matmul(spec.hidden(gate_RF, up_RF), weights.down_EFD)
    if not is_whole:
        out_RD = jnp.where(is_local_R1, out_RD, 0)
    out_MKD = _permute(out_RD, inverse_R, order_R).reshape(B * T, K, D).astype(jnp.float32)
    summed = (
        jnp.sum(out_MKD, axis=1) if spec.scales_input else jnp.einsum("MKD,MK->MD", out_MKD, weights_R.reshape(-1, K))
    )
    return summed.reshape(B, T, D)


def _grouped_matmul(
    x_RD: jax.Array, w_EDF: jax.Array, *, sizes_E: jax.Array, kernel: KernelChoice, place: Placement
) -> jax.Array:
    with kernel_errors_as_config_errors():
        return grouped_matmul(x_RD, w_EDF, sizes_E, **kernel._asdict(), place=place)


def _slots(ids_BTK: jax.Array, is_real_BT: jax.Array | None, experts: int) -> jax.Array:
    """[B, T, K] slot of each token at its experts: the number of earlier tokens routed there.

    Padding is not counted and gets the slot T, which is beyond any capacity.
    """
    is_routed_BTE = jnp.any(ids_BTK[..., None] == jnp.arange(experts), axis=2)
    if is_real_BT is not None:
        is_routed_BTE = is_routed_BTE & is_real_BT[..., None]
    before_BTE = jnp.cumsum(is_routed_BTE, axis=1) - is_routed_BTE
    slots_BTK = jnp.take_along_axis(before_BTE, ids_BTK, axis=-1)
    return slots_BTK if is_real_BT is None else jnp.where(is_real_BT[..., None], slots_BTK, ids_BTK.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _repeat_sorted(x_MD: jax.Array, order_R: jax.Array, inverse_R: jax.Array, K: int) -> jax.Array:
    """Each token K times, in the order of `order_R`, whose inverse permutation is `inverse_R`.

    The gradient is a gather and a sum, which is faster than a scatter-add, and deterministic.
    """
    return x_MD[order_R // K]


def _repeat_sorted_forward(
    x_MD: jax.Array, order_R: jax.Array, inverse_R: jax.Array, K: int
) -> tuple[jax.Array, jax.Array]:
    return _repeat_sorted(x_MD, order_R, inverse_R, K), inverse_R


def _repeat_sorted_backward(K: int, inverse_R: jax.Array, d_RD: jax.Array) -> tuple[jax.Array, None, None]:
    d_MKD = d_RD[inverse_R].reshape(-1, K, d_RD.shape[1])
    return jnp.sum(d_MKD, axis=1, dtype=jnp.float32).astype(d_RD.dtype), None, None


_repeat_sorted.defvjp(_repeat_sorted_forward, _repeat_sorted_backward)


@jax.custom_vjp
def _permute(x_RD: jax.Array, order_R: jax.Array, inverse_R: jax.Array) -> jax.Array:
    """Rows permuted by `order_R`, whose inverse is `inverse_R`; the gradient is a gather too."""
    return x_RD[order_R]


def _permute_forward(x_RD: jax.Array, order_R: jax.Array, inverse_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_RD[order_R], inverse_R


def _permute_backward(inverse_R: jax.Array, d_RD: jax.Array) -> tuple[jax.Array, None, None]:
    return d_RD[inverse_R], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _axes(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
