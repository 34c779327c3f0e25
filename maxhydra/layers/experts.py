"""The experts of a mixture, and how the tokens they were given reach them.

Dropless: rows are sorted by expert and meet the weights in one grouped product, however uneven the load (Gale et al.,
2022). Over several devices each holds some of the experts, sees the tokens of those that hold the others, and adds up
what its own make of them. With a capacity: each expert has so many places for the tokens of a sequence, and products
are ordinary ones (Lepikhin et al., 2021).

B batch, T tokens, D residual stream, E experts, K experts of a token, F hidden, M = B * T tokens, R = M * K rows, C
places of an expert.
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
from maxhydra.layers.context import Context
from maxhydra.layers.kernel_options import KernelChoice, kernel_errors_as_config_errors
from maxhydra.layers.mlp import gated
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.quant.int4 import Int4
from maxhydra.layers.quant.int8 import Int8
from maxhydra.layers.quant.qat import is_trained_for, rounding, straight


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """Sizes and mechanisms, resolved."""

    emb_dim: int
    experts: int
    dim: int
    activation: config.Activation
    has_bias: bool
    clamp: float | None
    clamp_slope: float
    scales_input: bool
    wanted: KernelChoice
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
            wanted=KernelChoice(model.kernels.grouped_matmul.value, model.kernels.sizes("grouped_matmul")),
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            compute=Dtypes.of(model.dtypes).compute,
        )

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """What the last map sees."""
        if self.clamp is None:
            return gated(self.activation, gate, up)
        wide_gate = jnp.minimum(gate.astype(jnp.float32), self.clamp)
        wide_up = jnp.clip(up.astype(jnp.float32), -self.clamp, self.clamp)
        return ((wide_up + 1) * wide_gate * jax.nn.sigmoid(self.clamp_slope * wide_gate)).astype(gate.dtype)


class ExpertLinear(nnx.Module):
    """One linear map of every expert."""

    def __init__(self, name: str, shape: tuple[int, int], axes: tuple[str, str], *, spec: ExpertsSpec, make: Any):
        scale = spec.out_scale if name == "down" else spec.init_scale
        self.name, self.format = make.named(name)
        if self.format is not None and self.format.rounds_inputs:
            reason = f"{self.name} belongs to experts, whose products take them as they are"
            hint = f"+quantization.overrides.experts={{kind: {self.format.kind.value}, targets: [{self.name}]}}"
            raise ConfigError(Problem("quantization.activations", reason, value="int8", accepted="compute", hint=hint))
        self.compute = spec.compute
        self.kernel = make.experts(name, spec.experts, shape, axes, std=scale * shape[0] ** -0.5)
        self.bias = make.zeros((spec.experts, shape[1]), ("experts", axes[1])) if spec.has_bias else None

    @property
    def weight(self) -> jax.Array:
        """[E, inputs, outputs]. What is kept in fewer bits is made whole for each call: that saves memory, not time."""
        if isinstance(self.kernel, Int8):
            return self.kernel.unpacked(self.compute)
        if isinstance(self.kernel, Int4):
            return self.kernel.unpacked(self.kernel.parts, self.compute)
        if self.format is not None and is_trained_for(self.format):
            return straight(rounding(self.format, inputs=1, leading=1, name=self.name), self.kernel[...])
        return self.kernel[...]


class RoutedTokens(NamedTuple):
    """Tokens and the experts they were given to."""

    x_BTD: jax.Array
    ids_BTK: jax.Array
    weights_BTK: jax.Array


class Weights(NamedTuple):
    """What the experts multiply with; no biases: None."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_EF: jax.Array | None
    up_EF: jax.Array | None


class Experts(nnx.Module):
    """down(activation(gate(x)) * up(x)) of each token's experts, weighted."""

    def __init__(self, spec: ExpertsSpec, make: ParamBuilder):
        self.spec = spec
        D, F = spec.emb_dim, spec.dim
        self.gate = ExpertLinear("gate", (D, F), ("embed", "mlp"), spec=spec, make=make)
        self.up = ExpertLinear("up", (D, F), ("embed", "mlp"), spec=spec, make=make)
        self.down = ExpertLinear("down", (F, D), ("mlp", "embed"), spec=spec, make=make)

    def __call__(
        self, given: RoutedTokens, ctx: Context, *, capacity: int | None, is_real_BT: jax.Array | None
    ) -> jax.Array:
        """[B, T, D] in float32. `capacity`: places of an expert in a sequence, which padding does not take."""
        if capacity is not None:
            slots_BTK = _slots(given.ids_BTK, is_real_BT, self.spec.experts)
            is_in_BTK = slots_BTK < capacity
            given = given._replace(weights_BTK=jnp.where(is_in_BTK, given.weights_BTK, 0))
            out_BTD = self._in_places(given, jnp.where(is_in_BTK, slots_BTK, capacity), ctx, capacity=capacity)
        elif ctx.sharder.mesh.size == 1:
            out_BTD = _routed(self._weights(), given, self.spec, ctx.place)
        else:
            out_BTD = self._over_devices(given, ctx)
        if self.down.bias is None:
            return out_BTD
        is_given_BTKE = given.ids_BTK[..., None] == jnp.arange(self.spec.experts)
        weights_BTE = jnp.sum(jnp.where(is_given_BTKE, given.weights_BTK[..., None], 0), axis=2)
        return out_BTD + jnp.einsum("BTE,ED->BTD", weights_BTE, self.down.bias[...].astype(jnp.float32))

    def _weights(self) -> Weights:
        biases = [None if one.bias is None else one.bias[...] for one in (self.gate, self.up)]
        return Weights(self.gate.weight, self.up.weight, self.down.weight, *biases)

    def _over_devices(self, given: RoutedTokens, ctx: Context) -> jax.Array:
        """Each device with the experts it holds; its rows come to those of others, and what they make of them back."""
        sharder, place = ctx.sharder, ctx.place
        length = "act_length" if ctx.is_length_split else None
        batch, along, hidden = sharder.spec(("act_batch", length, "act_mlp"))
        holders = sharder.mesh_axes("experts")
        tokens = PartitionSpec(batch, along, None)
        into, out_of = PartitionSpec(holders, None, hidden), PartitionSpec(holders, hidden, None)
        bias = PartitionSpec(holders, hidden) if self.spec.has_bias else None
        split = {0: _axes(batch), 1: _axes(along)}

        def on_device(weights: Weights, given: RoutedTokens) -> jax.Array:
            gathers = [(axis, dim) for axis in holders for dim, axes in split.items() if axis in axes]
            for axis, dim in reversed(gathers):
                given = RoutedTokens(*(jax.lax.all_gather(x, axis, axis=dim, tiled=True) for x in given))
            first = jax.lax.axis_index(holders) * weights.gate_EDF.shape[0] if holders else 0
            out_BTD = _routed(weights, given._replace(ids_BTK=given.ids_BTK - first), self.spec, place)
            out_BTD = jax.lax.psum(out_BTD, _axes(hidden)) if hidden else out_BTD
            for axis, dim in gathers:
                out_BTD = jax.lax.psum_scatter(out_BTD, axis, scatter_dimension=dim, tiled=True)
            rest = [axis for axis in holders if axis not in dict(gathers)]
            return jax.lax.psum(out_BTD, rest) if rest else out_BTD

        specs: Any = (Weights._make([into, into, out_of, bias, bias]), tokens)
        run = jax.shard_map(on_device, mesh=sharder.mesh, in_specs=specs, out_specs=tokens, check_vma=False)
        return run(self._weights(), given)

    def _in_places(self, given: RoutedTokens, slots_BTK: jax.Array, ctx: Context, *, capacity: int) -> jax.Array:
        """Every expert with its places for each sequence; slot `capacity` is none of them."""
        (B, T, D), E, C = given.x_BTD.shape, self.spec.experts, capacity
        places = (E, B, C)
        rows_B1 = jnp.arange(B)[:, None]
        token_BR = jnp.broadcast_to(jnp.arange(T)[:, None], given.ids_BTK.shape[1:]).reshape(1, -1)
        ids_BR, slots_BR = given.ids_BTK.reshape(B, -1), slots_BTK.reshape(B, -1)
        at = (ids_BR, rows_B1, slots_BR)
        # Token of each place, T where none came; a slot past the last is dropped.
        token_EBC = jnp.full(places, T).at[at].set(token_BR, mode="drop")
        x_BTD = jnp.pad(given.x_BTD, ((0, 0), (0, 1), (0, 0)))
        x_EBCD = x_BTD[jnp.arange(B)[None, :, None], token_EBC]
        if self.spec.scales_input:
            weight_EBC = jnp.zeros(places).at[at].set(given.weights_BTK.reshape(B, -1), mode="drop")
            x_EBCD = (x_EBCD * weight_EBC[..., None]).astype(x_EBCD.dtype)
        x_EBCD = ctx.sharder.constrain(x_EBCD, "act_experts", "act_batch", None, "act_embed")
        hidden_EBCF = self.spec.hidden(*(self._mapped(one, x_EBCD, ctx) for one in (self.gate, self.up)))
        out_EBCD = jnp.einsum("EBCF,EFD->EBCD", hidden_EBCF, self.down.weight)
        out_EBCD = ctx.sharder.constrain(out_EBCD, "act_experts", "act_batch", None, "act_embed")
        out_BTKD = out_EBCD[ids_BR, rows_B1, jnp.minimum(slots_BR, C - 1)].reshape(B, T, -1, D)
        is_in_BTK = slots_BTK < C
        weights_BTK = is_in_BTK.astype(jnp.float32) if self.spec.scales_input else given.weights_BTK
        return jnp.einsum("BTKD,BTK->BTD", out_BTKD.astype(jnp.float32), weights_BTK)

    def _mapped(self, one: ExpertLinear, x_EBCD: jax.Array, ctx: Context) -> jax.Array:
        out_EBCF = jnp.einsum("EBCD,EDF->EBCF", x_EBCD, one.weight)
        if one.bias is not None:
            out_EBCF = out_EBCF + one.bias[...][:, None, None]
        return ctx.sharder.constrain(out_EBCF, "act_experts", "act_batch", None, "act_mlp")


def _routed(weights: Weights, given: RoutedTokens, spec: ExpertsSpec, place: Placement) -> jax.Array:
    """[B, T, D] in float32: what these experts make of the tokens given to them; those of ids out of range are others.

    Rows given to others are last, in no group. What the products leave there is kept out by selecting, both ways.
    """
    (B, T, D), E, K = given.x_BTD.shape, weights.gate_EDF.shape[0], given.ids_BTK.shape[-1]
    is_whole = spec.experts == E
    ids_R = given.ids_BTK.reshape(-1)
    ids_R = ids_R if is_whole else jnp.where((ids_R >= 0) & (ids_R < E), ids_R, E)
    order_R = jnp.argsort(ids_R, stable=True)
    back_R = jnp.argsort(order_R)
    sizes_E = jnp.sum(ids_R[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    weights_R = given.weights_BTK.reshape(-1)
    rows_RD = _spread(given.x_BTD.reshape(B * T, D), order_R, back_R, K)
    is_own_R1 = (jnp.arange(B * T * K) < jnp.sum(sizes_E))[:, None]
    if not is_whole:
        rows_RD = jnp.where(is_own_R1, rows_RD, 0)
    if spec.scales_input:
        rows_RD = (rows_RD * weights_R[order_R][:, None]).astype(rows_RD.dtype)
    product = partial(_product, sizes_E=sizes_E, wanted=spec.wanted, place=place)
    gate_RF, up_RF = (product(rows_RD, kernel_EDF) for kernel_EDF in (weights.gate_EDF, weights.up_EDF))
    if weights.gate_EF is not None and weights.up_EF is not None:
        group_R = ids_R[order_R]
        gate_RF, up_RF = (x + bias_EF[group_R] for x, bias_EF in ((gate_RF, weights.gate_EF), (up_RF, weights.up_EF)))
    gate_RF, up_RF = checkpoint_name(gate_RF, "mlp_gate"), checkpoint_name(up_RF, "mlp_up")
    out_RD = product(spec.hidden(gate_RF, up_RF), weights.down_EFD)
    if not is_whole:
        out_RD = jnp.where(is_own_R1, out_RD, 0)
    out_MKD = _sorted(out_RD, back_R, order_R).reshape(B * T, K, D).astype(jnp.float32)
    summed = (
        jnp.sum(out_MKD, axis=1) if spec.scales_input else jnp.einsum("MKD,MK->MD", out_MKD, weights_R.reshape(-1, K))
    )
    return summed.reshape(B, T, D)


def _product(
    x_RD: jax.Array, w_EDF: jax.Array, *, sizes_E: jax.Array, wanted: KernelChoice, place: Placement
) -> jax.Array:
    with kernel_errors_as_config_errors():
        return grouped_matmul(x_RD, w_EDF, sizes_E, **wanted._asdict(), place=place)


def _slots(ids_BTK: jax.Array, is_real_BT: jax.Array | None, experts: int) -> jax.Array:
    """How many earlier tokens of the sequence were given to the same expert, [B, T, K]; padding is not counted, and
    comes last."""
    is_given_BTE = jnp.any(ids_BTK[..., None] == jnp.arange(experts), axis=2)
    if is_real_BT is not None:
        is_given_BTE = is_given_BTE & is_real_BT[..., None]
    before_BTE = jnp.cumsum(is_given_BTE, axis=1) - is_given_BTE
    slots_BTK = jnp.take_along_axis(before_BTE, ids_BTK, axis=-1)
    return slots_BTK if is_real_BT is None else jnp.where(is_real_BT[..., None], slots_BTK, ids_BTK.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x_MD: jax.Array, order_R: jax.Array, back_R: jax.Array, K: int) -> jax.Array:
    """Each token K times, in an order of which `back` is the inverse.

    The gradient is gathered and summed, which is faster than adding rows where they belong, and the same every time.
    """
    return x_MD[order_R // K]


def _spread_forward(x_MD: jax.Array, order_R: jax.Array, back_R: jax.Array, K: int) -> tuple[jax.Array, jax.Array]:
    return _spread(x_MD, order_R, back_R, K), back_R


def _spread_backward(K: int, back_R: jax.Array, d_RD: jax.Array) -> tuple[jax.Array, None, None]:
    d_MKD = d_RD[back_R].reshape(-1, K, d_RD.shape[1])
    return jnp.sum(d_MKD, axis=1, dtype=jnp.float32).astype(d_RD.dtype), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _sorted(x_RD: jax.Array, order_R: jax.Array, back_R: jax.Array) -> jax.Array:
    """Rows in an order of which `back` is the inverse."""
    return x_RD[order_R]


def _sorted_forward(x_RD: jax.Array, order_R: jax.Array, back_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_RD[order_R], back_R


def _sorted_backward(back_R: jax.Array, d_RD: jax.Array) -> tuple[jax.Array, None, None]:
    return d_RD[back_R], None, None


_sorted.defvjp(_sorted_forward, _sorted_backward)


def _axes(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
