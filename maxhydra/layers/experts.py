"""The experts of a mixture, and the dispatch of tokens to them.

Dropless (expert_rows.py): rows are sorted by expert and multiplied in one grouped matmul, for any load; over several
devices expert_parallel.py sends them to their experts. With a capacity (Lepikhin et al., 2021): each expert has a fixed
number of slots per sequence, and matmuls are batched ones.

B batch, T tokens, D residual stream, E experts, K experts per token, F hidden, M = B * T tokens, R = M * K rows, C
slots of an expert.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.grouped_matmul import few_rows
from maxhydra.kernels.grouped_matmul.expert_weights import unpack
from maxhydra.layers.context import Context
from maxhydra.layers.expert_mlp import ExpertsSpec, Weights
from maxhydra.layers.expert_parallel import ExpertMesh, expert_parallel
from maxhydra.layers.expert_rows import RoutedTokens, SharedExpert, Tokens, dropless
from maxhydra.layers.low_rank import Factors, factors_of
from maxhydra.layers.params import ParamBuilder
from maxhydra.layers.quant.four_bit import FourBit
from maxhydra.layers.quant.int8 import Int8
from maxhydra.layers.quant.training import is_qat, rounding, straight_through


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
        self.kernel, self.lora = make.experts(name, spec.experts, shape, axes, std=scale * shape[0] ** -0.5)
        self.bias = make.zeros((spec.experts, shape[1]), ("experts", axes[1])) if spec.has_bias else None

    @property
    def weight(self) -> jax.Array:
        """[E, inputs, outputs]. Quantized kernels are dequantized on every call, which saves memory, not time."""
        if isinstance(self.kernel, Int8):
            return self.kernel.unpacked(self.compute)
        if isinstance(self.kernel, FourBit):
            if (packed := self.kernel.packed) is not None:
                return unpack(packed, self.compute)
            return self.kernel.unpacked(self.kernel.parts, self.compute)
        if self.format is not None and is_qat(self.format):
            return straight_through(rounding(self.format, inputs=1, leading=1, name=self.name), self.kernel[...])
        return self.kernel[...]

    def update(self, ctx: Context) -> Factors | None:
        """The LoRA update of every expert; None without an active one."""
        return factors_of(self.lora, self.compute, is_adapted=ctx.is_adapted)

    @property
    def stored(self) -> few_rows.Matrices:
        """INT8 codes with their scales, packed 4-bit weights, or `weight`, and the bias."""
        bias_EN = None if self.bias is None else self.bias[...]
        if isinstance(self.kernel, Int8):
            return few_rows.Matrices(self.kernel.parts.codes, self.kernel.parts.scales, bias_EN)
        packed = self.kernel.packed if isinstance(self.kernel, FourBit) else None
        return few_rows.Matrices(self.weight, None, bias_EN) if packed is None else packed._replace(bias_EN=bias_EN)


class ExpertsOutput(NamedTuple):
    """The output of the experts."""

    out_BTD: jax.Array
    """In float32, sharded as the residual stream."""
    dropped: jax.Array | None
    """How many pairs of a token and one of its experts were not computed; None if none can be."""


class Experts(nnx.Module):
    """Weighted sum over each token's experts of down(activation(gate(x)) * up(x)), or of plain MLPs without a gate."""

    def __init__(self, spec: ExpertsSpec, make: ParamBuilder):
        self.spec = spec
        D, F = spec.emb_dim, spec.dim
        into = partial(ExpertLinear, shape=(D, F), axes=("embed", "mlp"), spec=spec, make=make)
        self.gate = into("gate") if spec.is_gated else None
        self.up = into("up")
        self.down = ExpertLinear("down", (F, D), ("mlp", "embed"), spec=spec, make=make)

    def __call__(
        self,
        routed: RoutedTokens,
        ctx: Context,
        *,
        capacity: int | None,
        is_real_BT: jax.Array,
        shared: SharedExpert | None = None,
    ) -> ExpertsOutput:
        """`capacity`: slots of an expert per sequence, which padding does not use. `shared`: only if `adds_shared`."""
        fits_BTK = None
        if capacity is not None:
            slots_BTK = _slots(routed.ids_BTK, is_real_BT, self.spec.experts)
            fits_BTK = slots_BTK < capacity
            out_BTD = self._with_capacity(routed, jnp.where(fits_BTK, slots_BTK, capacity), ctx, capacity=capacity)
            out_BTD = ctx.to_stream(out_BTD)
        elif not ctx.place.free_axes:
            out_MD = self._decode(routed.flat(), is_real_BT, ctx)
            if out_MD is None:
                out_MD = dropless(self._weights(ctx), routed.flat(), self.spec, ctx.place)
            out_BTD = out_MD.reshape(routed.x_BTD.shape)
        else:
            mesh = ExpertMesh.of(self.spec, ctx)
            out_BTD, fits_BTK = expert_parallel(self._weights(ctx), routed, is_real_BT, mesh, ctx, shared=shared)
        dropped = None if fits_BTK is None else jnp.sum(is_real_BT[..., None] & ~fits_BTK, dtype=jnp.float32)
        if self.down.bias is None:
            return ExpertsOutput(out_BTD, dropped)
        is_routed_BTKE = routed.ids_BTK[..., None] == jnp.arange(self.spec.experts)
        is_routed_BTKE = is_routed_BTKE if fits_BTK is None else is_routed_BTKE & fits_BTK[..., None]
        weights_BTE = jnp.sum(jnp.where(is_routed_BTKE, routed.weights_BTK[..., None], 0), axis=2)
        bias_ED = self.down.bias[...].astype(jnp.float32)
        return ExpertsOutput(out_BTD + jnp.einsum("BTE,ED->BTD", weights_BTE, bias_ED), dropped)

    def adds_shared(self, ctx: Context, *, capacity: int | None) -> bool:
        """Whether a shared expert can be computed with these, so that the sums of both are sent once."""
        return capacity is None and bool(ctx.place.free_axes) and ExpertMesh.of(self.spec, ctx).adds_shared

    def _decode(self, tokens: Tokens, is_real_BT: jax.Array, ctx: Context) -> jax.Array | None:
        """[M, D] in float32, by kernels that read only the experts of real tokens; None if they do not apply."""
        if ctx.cache is None or not self.spec.is_fused or self.spec.scales_input or self._is_adapted(ctx):
            return None
        gate = None if self.gate is None else self.gate.stored
        experts = few_rows.Experts(gate, self.up.stored, self.down.stored)
        if not few_rows.is_supported(tokens.x_MD.shape[0], experts, tokens.x_MD.dtype.name):
            return None
        ids_MK = jnp.where(is_real_BT.reshape(-1, 1), tokens.ids_MK, -1)
        return few_rows.apply_experts(tokens.x_MD, ids_MK, tokens.weights_MK, experts, self.spec.wide_hidden)

    def _is_adapted(self, ctx: Context) -> bool:
        return any(linear is not None and linear.update(ctx) for linear in (self.gate, self.up, self.down))

    def _weights(self, ctx: Context) -> Weights:
        into = (self.gate, self.up)
        biases = [None if linear is None or linear.bias is None else linear.bias[...] for linear in into]
        gate_EDF = None if self.gate is None else self.gate.weight
        updates = [None if linear is None else linear.update(ctx) for linear in (*into, self.down)]
        return Weights(gate_EDF, self.up.weight, self.down.weight, *biases, *updates)

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
        gate_EBCF = None
        if self.gate is not None:
            gate_EBCF = checkpoint_name(self._project(self.gate, x_EBCD, ctx), "mlp_gate")
        up_EBCF = checkpoint_name(self._project(self.up, x_EBCD, ctx), "mlp_up")
        hidden_EBCF = self.spec.hidden(gate_EBCF, up_EBCF)
        out_EBCD = _batched_matmul(hidden_EBCF, self.down, ctx)
        out_EBCD = ctx.sharder.constrain(out_EBCD, "act_experts", "act_batch", None, "act_embed")
        out_BTKD = out_EBCD[ids_BR, rows_B1, jnp.minimum(slots_BR, C - 1)].reshape(B, T, -1, D)
        weights_BTK = jnp.where(slots_BTK < C, 1 if self.spec.scales_input else routed.weights_BTK, 0)
        return jnp.einsum("BTKD,BTK->BTD", out_BTKD.astype(jnp.float32), weights_BTK)

    def _project(self, linear: ExpertLinear, x_EBCD: jax.Array, ctx: Context) -> jax.Array:
        out_EBCF = _batched_matmul(x_EBCD, linear, ctx)
        if linear.bias is not None:
            out_EBCF = out_EBCF + linear.bias[...][:, None, None]
        return ctx.sharder.constrain(out_EBCF, "act_experts", "act_batch", None, "act_mlp")


def _batched_matmul(x_EBCD: jax.Array, linear: ExpertLinear, ctx: Context) -> jax.Array:
    """The rows of each expert times its kernel, plus its LoRA update."""
    out_EBCF = jnp.einsum("EBCD,EDF->EBCF", x_EBCD, linear.weight)
    if (update := linear.update(ctx)) is None:
        return out_EBCF
    return out_EBCF + jnp.einsum("EBCr,ErF->EBCF", jnp.einsum("EBCD,EDr->EBCr", x_EBCD, update.a), update.b)


def _slots(ids_BTK: jax.Array, is_real_BT: jax.Array, experts: int) -> jax.Array:
    """[B, T, K] slot of each token at its experts: the number of earlier tokens routed there.

    Padding is not counted and gets the slot T, which is beyond any capacity.
    """
    is_routed_BTE = jnp.any(ids_BTK[..., None] == jnp.arange(experts), axis=2) & is_real_BT[..., None]
    before_BTE = jnp.cumsum(is_routed_BTE, axis=1) - is_routed_BTE
    slots_BTK = jnp.take_along_axis(before_BTE, ids_BTK, axis=-1)
    return jnp.where(is_real_BT[..., None], slots_BTK, ids_BTK.shape[1])
