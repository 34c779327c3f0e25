"""The feed-forward of experts on one device: rows in groups, each multiplied by the matrices of its expert.

D inputs and outputs, E experts, F hidden, R rows, sorted by expert.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.grouped_matmul import grouped_matmul, grouped_matmul_pair
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
    gate_RF, up_RF = _gate_and_up(weights, rows_RD, sizes_E, spec.kernel, place)
    if weights.up_EF is not None:
        ends_E, row_R1 = jnp.cumsum(sizes_E), jnp.arange(rows_RD.shape[0])[:, None]
        is_of_RE = (row_R1 >= ends_E - sizes_E) & (row_R1 < ends_E)
        if gate_RF is not None and weights.gate_EF is not None:
            gate_RF = _add_bias(gate_RF, weights.gate_EF, is_of_RE)
        up_RF = _add_bias(up_RF, weights.up_EF, is_of_RE)
    gate_RF = None if gate_RF is None else checkpoint_name(gate_RF, "mlp_gate")
    up_RF = checkpoint_name(up_RF, "mlp_up")
    down = _Down(spec, place)
    if weights.down_update is None:
        return _down(down, gate_RF, up_RF, weights_R, weights.down_EFD, sizes_E)
    hidden_RF = down.hidden(gate_RF, up_RF, weights_R)
    out_RD = down.project(hidden_RF, weights.down_EFD, sizes_E)
    return out_RD + _update(hidden_RF, weights.down_update, sizes_E, spec.kernel, place)


def _gate_and_up(
    weights: Weights, rows_RD: jax.Array, sizes_E: jax.Array, kernel: KernelChoice, place: Placement
) -> tuple[jax.Array | None, jax.Array]:
    """Both projections with their LoRA updates, whose gradient by the rows is one matmul where the kernel can."""
    gate_RF = None
    if weights.gate_EDF is None:
        up_RF = _grouped_matmul(rows_RD, weights.up_EDF, sizes_E, kernel, place)
    else:
        with kernel_errors_as_config_errors():
            gate_RF, up_RF = grouped_matmul_pair(
                rows_RD, weights.gate_EDF, weights.up_EDF, sizes_E, **kernel._asdict(), place=place
            )
    if gate_RF is not None and weights.gate_update is not None:
        gate_RF = gate_RF + _update(rows_RD, weights.gate_update, sizes_E, kernel, place)
    if weights.up_update is not None:
        up_RF = up_RF + _update(rows_RD, weights.up_update, sizes_E, kernel, place)
    return gate_RF, up_RF


@dataclasses.dataclass(frozen=True)
class _Down:
    """The static arguments of the down projection."""

    spec: ExpertsSpec
    place: Placement

    def hidden(self, gate_RF: jax.Array | None, up_RF: jax.Array, weights_R: jax.Array | None) -> jax.Array:
        """The input of the projection, computed in float32 and rounded once."""
        hidden_RF = self.spec.wide_hidden(gate_RF, up_RF)
        return (hidden_RF if weights_R is None else hidden_RF * weights_R[:, None]).astype(up_RF.dtype)

    def project(self, hidden_RF: jax.Array, down_EFD: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return _grouped_matmul(hidden_RF, down_EFD, sizes_E, self.spec.kernel, self.place)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _down(
    down: _Down,
    gate_RF: jax.Array | None,
    up_RF: jax.Array,
    weights_R: jax.Array | None,
    down_EFD: jax.Array,
    sizes_E: jax.Array,
) -> jax.Array:
    """Activation, weights of the rows, and the down projection.

    Its input is not saved: the backward pass computes it in the pass over gate and up that gives their gradients.
    """
    return down.project(down.hidden(gate_RF, up_RF, weights_R), down_EFD, sizes_E)


def _down_forward(down: _Down, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _down(down, *arrays), arrays


def _down_backward(down: _Down, saved: tuple[Any, ...], d_out_RD: jax.Array) -> tuple[Any, ...]:
    *inputs, down_EFD, sizes_E = saved
    _, pull_back = jax.vjp(lambda hidden_RF: down.project(hidden_RF, down_EFD, sizes_E), jnp.zeros_like(inputs[1]))
    (d_hidden_RF,) = pull_back(d_out_RD)
    # Without the barrier XLA may keep the input of the forward pass after all.
    hidden_RF, pull_back = jax.vjp(down.hidden, *jax.lax.optimization_barrier(inputs))
    d_gate_RF, d_up_RF, d_weights_R = pull_back(d_hidden_RF)
    _, pull_back = jax.vjp(lambda down_EFD: down.project(hidden_RF, down_EFD, sizes_E), down_EFD)
    return d_gate_RF, d_up_RF, d_weights_R, *pull_back(d_out_RD), None


_down.defvjp(_down_forward, _down_backward)


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


def _grouped_matmul(
    x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, kernel: KernelChoice, place: Placement
) -> jax.Array:
    """Rows times the kernel of their expert."""
    with kernel_errors_as_config_errors():
        return grouped_matmul(x_RD, w_EDF, sizes_E, **kernel._asdict(), place=place)


def _update(x_RD: jax.Array, update: Factors, sizes_E: jax.Array, kernel: KernelChoice, place: Placement) -> jax.Array:
    """The LoRA update of the rows by two smaller grouped matmuls; tile sizes are for those of the experts."""
    kernel = KernelChoice(kernel.backend, sizes=())
    a_EDr, b_ErF = update.padded(RANK_MULTIPLES.get(place.platform, 1))
    return _grouped_matmul(_grouped_matmul(x_RD, a_EDr, sizes_E, kernel, place), b_ErF, sizes_E, kernel, place)
