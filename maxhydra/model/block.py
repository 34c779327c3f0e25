"""One transformer layer, its rematerialization, and multi-token prediction. B batch, T tokens, D residual stream.

Rematerialization (Chen et al., 2016) decides which activations of a layer are saved for the backward pass, and where.
In multi-token prediction (DeepSeek-V3, 2024) the k-th extra layer predicts the token k after the next; its inputs are
the hidden states of the layer before it and the embedding of the token k positions later.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.plug_ins import call_plug_in
from maxhydra.config.schema import model as config
from maxhydra.config.schema.plug_in import PlugIn
from maxhydra.kernels.attention.spec import CHECKPOINT_NAME, EXCHANGE_NAME
from maxhydra.layers import (
    AttentionSpec,
    AuxOutputs,
    Cache,
    CacheSpec,
    Context,
    DeltaSpec,
    FeedForward,
    FeedForwardSpec,
    Mixer,
    MixerSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    Norm,
    NormSpec,
    ParallelMoe,
    ParallelMoeSpec,
    ParamBuilder,
    PerLayerInput,
    PerLayerSpec,
    dropout,
    norm_with_residual,
)
from maxhydra.layers.absent import NoMixerSpec, NoMlpSpec
from maxhydra.layers.compressed_attention import CompressedSpec
from maxhydra.layers.engram import EngramSpec
from maxhydra.layers.hyper_connections import HyperSpec
from maxhydra.layers.interfaces import MixerOutput
from maxhydra.layers.qk_clip import HEAD_LOGITS
from maxhydra.layers.router import ROUTING
from maxhydra.layers.short_convolution import ConvolutionSpec
from maxhydra.layers.ssm import SsmSpec
from maxhydra.layers.statistics import LAYER, activation_statistics
from maxhydra.sharding import Sharder

MIXERS: dict[config.Mixer, Any] = {
    config.Mixer.attention: AttentionSpec,
    config.Mixer.compressed: CompressedSpec,
    config.Mixer.convolution: ConvolutionSpec,
    config.Mixer.delta: DeltaSpec,
    config.Mixer.mla: MlaSpec,
    config.Mixer.ssm: SsmSpec,
    config.Mixer.none: NoMixerSpec,
}
MLPS: dict[config.FeedForward, type[MlpSpec] | type[MoeSpec] | type[NoMlpSpec]] = {
    config.FeedForward.mlp: MlpSpec,
    config.FeedForward.moe: MoeSpec,
    config.FeedForward.none: NoMlpSpec,
}


def _mixer_spec(model: config.Model, kind: config.Kind, name: str) -> MixerSpec:
    if kind.mixer is not config.Mixer.own_mixer:
        built_in: MixerSpec = MIXERS[kind.mixer].of(model, kind)
        return built_in
    spec: MixerSpec = _own_spec(kind.own_mixer, model, kind, key=f"model.kinds.{name}.own_mixer.function")
    return spec


def _feed_forward_spec(model: config.Model, kind: config.Kind, name: str) -> FeedForwardSpec:
    if kind.latent_dim is not None:
        model = dataclasses.replace(model, emb_dim=kind.latent_dim)
    if kind.feed_forward is not config.FeedForward.own_feed_forward:
        return MLPS[kind.feed_forward].of(model, kind)
    key = f"model.kinds.{name}.own_feed_forward.function"
    spec: FeedForwardSpec = _own_spec(kind.own_feed_forward, model, kind, key=key)
    return spec


def _own_spec(layer: PlugIn, model: config.Model, kind: config.Kind, *, key: str) -> Any:
    """The spec of a layer mechanism of the user."""
    assert layer.function is not None
    return call_plug_in(layer.function, model, kind, options=layer.options, key=key)


class BlockOutput(NamedTuple):
    """Everything that one layer returns."""

    x_BTD: jax.Array
    cache: Any
    """The layer's updated cache; None without one."""
    aux: dict[str, AuxOutputs]
    """Aux outputs by sub-layer; only sub-layers that have any."""
    shared: Any
    """What later layers read as `ctx.shared[kind]`, such as keys and values; None if nothing is shared."""


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One layer kind, resolved from the config."""

    name: str
    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    parallel_moe: ParallelMoeSpec | None
    per_layer: PerLayerSpec | None
    is_scaled: bool
    emb_dim: int
    latent_dim: int | None
    """Width between mixer and feed-forward in one residual branch; None for two branches."""
    hyper: HyperSpec | None
    """Hyper-connections; None for one residual stream."""
    engram: EngramSpec | None
    """Memory of n-grams before the mixer; None without one."""
    up_scale: float
    """Scale of the projection from latent_dim to emb_dim."""
    branch_factor: float
    """Constant factor on the output of a residual branch."""
    norms: config.Norms
    norm: NormSpec
    dropout: float

    @classmethod
    def of(cls, model: config.Model, name: str) -> "BlockSpec":
        kind = model.kinds[name]
        return cls(
            name=name,
            mixer=_mixer_spec(model, kind, name),
            feed_forward=_feed_forward_spec(model, kind, name),
            parallel_moe=ParallelMoeSpec.of(model, kind),
            per_layer=PerLayerSpec.of(model),
            is_scaled=kind.is_scaled,
            emb_dim=model.emb_dim,
            latent_dim=kind.latent_dim,
            hyper=HyperSpec.of(model),
            engram=EngramSpec.of(model, kind),
            up_scale=model.init_scale,
            branch_factor=model.multipliers.branch,
            norms=kind.norms,
            norm=NormSpec.of(model),
            dropout=model.dropout,
        )

    def apply_aux_updates(self, new: Any, old: Any, aux: dict[str, AuxOutputs]) -> Any:
        """Return the layer's weights after an optimizer step, with the updates that do not come from gradients.

        Router biases follow the load in `aux`, and QK-Clip the largest attention logits. The layer's constant scale is
        restored: it has no gradient, but weight decay would change it.
        """
        if "scale" in new:
            new = {**new, "scale": old["scale"]}
        if HEAD_LOGITS in aux.get("attention", {}) and "attention" in new:
            assert isinstance(self.mixer, AttentionSpec | MlaSpec)
            new = {**new, "attention": self.mixer.apply_aux_updates(new["attention"], aux["attention"])}
        if "mlp" not in aux or "mlp" not in new:
            return new
        return {**new, "mlp": self.feed_forward.apply_aux_updates(new["mlp"], old["mlp"], aux["mlp"])}

    def idle_parameters(self) -> int:
        """Number of weights that are not used for a given token: experts and rows of a memory."""
        parallel_moe = self.parallel_moe.moe.idle_parameters() if self.parallel_moe else 0
        memory = self.engram.idle_parameters() if self.engram else 0
        return self.feed_forward.idle_parameters() + parallel_moe + memory

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token of a sequence of this length."""
        parallel_moe = 0.0 if self.parallel_moe is None else self.parallel_moe.moe.forward_flops()
        per_layer = 0.0 if self.per_layer is None else self.per_layer.forward_flops()
        up = 0.0 if self.latent_dim is None else 2.0 * self.latent_dim * self.emb_dim
        streams = 0.0 if self.hyper is None else self.hyper.forward_flops()
        memory = 0.0 if self.engram is None else self.engram.forward_flops()
        extra = parallel_moe + per_layer + up + streams + memory
        return self.mixer.forward_flops(seq_len) + self.feed_forward.forward_flops() + extra


def block_output(
    x_BTD: jax.Array, mixer: MixerOutput, mlp_BTD: jax.Array, aux: dict[str, AuxOutputs], ctx: Context
) -> BlockOutput:
    """The output of a layer, with statistics of its activations if they are due."""
    activations = {"attention": mixer.out_BTD, "mlp": mlp_BTD, "stream": x_BTD}
    aux = {**aux, LAYER: activation_statistics(activations, ctx)}
    return BlockOutput(x_BTD, mixer.cache, drop_empty(aux), mixer.shared)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), for any mixer and feed-forward under these two names.

    `norms=post` normalizes the branch outputs instead of their inputs, `norms=sandwich` both.
    """

    def __init__(self, spec: BlockSpec, make: ParamBuilder):
        self.spec = spec
        has_pre, has_post = spec.norms is not config.Norms.post, spec.norms is not config.Norms.pre
        has_mixer = not isinstance(spec.mixer, NoMixerSpec)
        has_mlp = not isinstance(spec.feed_forward, NoMlpSpec)
        self.attention_norm = self._build_norm(make, has_pre and has_mixer)
        self.attention: Mixer = spec.mixer.build(make.below("attention"))
        self.attention_post_norm = self._build_norm(make, has_post and has_mixer)
        self.mlp_norm = self._build_norm(make, has_pre and has_mlp, spec.latent_dim)
        self.mlp: FeedForward = spec.feed_forward.build(make.below("mlp"))
        self.parallel_moe = (
            None if spec.parallel_moe is None else ParallelMoe(spec.parallel_moe, make.below("parallel_moe"))
        )
        self.mlp_post_norm = self._build_norm(make, has_post and has_mlp)
        self.per_layer = None if spec.per_layer is None else PerLayerInput(spec.per_layer, make.below("per_layer"))
        self.scale = make.ones((1,), ("norm",)) if spec.is_scaled else None

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> BlockOutput:
        rate = self.spec.dropout
        x_BTD = ctx.constrain_stream(x_BTD)

        x_BTD, normed_BTD = self.split_norm(self.attention_norm, x_BTD, ctx)
        mixer = self.attention(normed_BTD, ctx)
        branch_BTD = self.branch_output(self.attention_post_norm, mixer.out_BTD)
        x_BTD = add_residual(x_BTD, dropout(branch_BTD, ctx.key(0), rate=rate), ctx)

        x_BTD, ctx = ctx.select_output_tokens(x_BTD), ctx.for_output_tokens()
        x_BTD, normed_BTD = self.split_norm(self.mlp_norm, x_BTD, ctx)
        feed_forward = self.mlp(normed_BTD, ctx)
        aux = {"mlp": feed_forward.aux, "attention": mixer.aux}
        if self.parallel_moe is not None:
            feed_forward = self.parallel_moe(x_BTD, feed_forward.out_BTD, ctx)
            aux["parallel_moe"] = feed_forward.aux
        branch_BTD = self.branch_output(self.mlp_post_norm, feed_forward.out_BTD)
        x_BTD = add_residual(x_BTD, dropout(branch_BTD, ctx.key(1), rate=rate), ctx)

        x_BTD = self.add_layer_input(x_BTD, ctx)
        return block_output(x_BTD, mixer, feed_forward.out_BTD, aux, ctx)

    def split_norm(self, norm: Norm | None, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Return the residual stream and its norm, the input of a branch."""
        x_BTD, normed_BTD = norm_with_residual(norm, x_BTD, kernel=self.spec.norm.kernel, place=ctx.place)
        return x_BTD, ctx.to_branch(normed_BTD)

    def branch_output(self, norm: Norm | None, x_BTD: jax.Array) -> jax.Array:
        """The summand of the residual stream: the output of a branch after its post-norm, times the constant factor."""
        branch_BTD = x_BTD if norm is None else norm(x_BTD)
        return branch_BTD if self.spec.branch_factor == 1 else branch_BTD * self.spec.branch_factor

    def add_layer_input(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """Add the per-layer embedding and apply the layer's constant scale, in the models that have them."""
        if self.per_layer is not None:
            x_BTD = x_BTD + self.per_layer(x_BTD, ctx)
        if self.scale is not None:
            x_BTD = x_BTD * jax.lax.stop_gradient(self.scale[...]).astype(x_BTD.dtype)
        return x_BTD

    @property
    def name(self) -> str:
        return self.spec.name

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        if not hasattr(self.attention, "empty_cache"):
            reason = "has no method empty_cache, without which the model cannot decode"
            raise ConfigError(Problem(f"model.kinds.{self.name}.own_mixer.function", reason))
        return self.attention.empty_cache(cache_spec, layers)

    def _build_norm(self, make: ParamBuilder, is_present: bool, dim: int | None = None) -> Norm | None:
        return self.spec.norm.build(dim or self.spec.emb_dim, make) if is_present else None


def add_residual(x_BTD: jax.Array, branch_BTD: jax.Array, ctx: Context) -> jax.Array:
    """x + branch.

    On one device the sum is computed on [B * T, D], the shape that matmuls write and norms read. A matmul that
    accumulates into its output then sees the other readers of the residual stream; given a reshaped view it would copy
    the stream and overwrite the copy.
    """
    if ctx.sharder.mesh.size > 1:
        return x_BTD + branch_BTD
    rows = (-1, x_BTD.shape[-1])
    return (x_BTD.reshape(rows) + branch_BTD.reshape(rows)).reshape(x_BTD.shape)


def drop_empty(aux: dict[str, AuxOutputs]) -> dict[str, AuxOutputs]:
    """Only the sub-layers that have aux outputs."""
    return {name: outputs for name, outputs in aux.items() if outputs}


class Mtp(Block):
    """norm(block(join([norm(embedding of the later token), norm(hidden)]))); a block with four extra weights."""

    def __init__(self, spec: BlockSpec, make: ParamBuilder, *, scale: float):
        super().__init__(spec, make)
        D = spec.emb_dim
        self.embedding_norm = spec.norm.build(D, make)
        self.hidden_norm = spec.norm.build(D, make)
        self.join = make.projection("join", (2 * D,), (D,), ("embed", None), scale=scale)
        self.norm = spec.norm.build(D, make)

    def predict(self, hidden_BTD: jax.Array, later_BTD: jax.Array, ctx: Context) -> BlockOutput:
        """Hidden states for the head, which then predicts one token further than the layer before."""
        inputs = [self.embedding_norm(later_BTD), self.hidden_norm(hidden_BTD)]
        out = self(self.join(jnp.concatenate(inputs, axis=-1), ctx), ctx)
        return out._replace(x_BTD=ctx.constrain_stream(self.norm(out.x_BTD)))


@dataclasses.dataclass(frozen=True)
class Remat:
    """The remat policy of a config, applied to the function of a layer."""

    policy: config.RematPolicy
    save: tuple[str, ...]
    offload: tuple[str, ...]
    saves_experts: bool = True
    """Whether `minimal` saves the matmuls of experts."""

    @classmethod
    def of(cls, remat: config.Remat) -> "Remat":
        is_auto = remat.policy is config.RematPolicy.auto
        policy = config.RematPolicy.minimal if is_auto else remat.policy
        return cls(policy, tuple(remat.save), tuple(remat.offload))

    def on(self, sharder: Sharder) -> "Remat":
        """The policy on a mesh: buffers for the rows of other devices are too large to save them in every layer."""
        return dataclasses.replace(self, saves_experts=not sharder.mesh_axes("experts"))

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """Wrap a function in jax.checkpoint with this policy.

        Outside a loop XLA must be kept from merging the recomputation with the original by CSE, which would save
        everything after all. In a scan the two are in different bodies, and the barrier would only cost time.
        """
        if self.policy is config.RematPolicy.none:
            return function
        return jax.checkpoint(function, policy=self._saveable(), prevent_cse=not in_loop)

    def _saveable(self) -> Callable[..., Any]:
        policies = jax.checkpoint_policies
        if self.policy is config.RematPolicy.full:
            return policies.nothing_saveable
        if self.policy is config.RematPolicy.minimal:
            # The projections; matmuls with a batch dimension are attention's, which grow with the square of the length.
            # Those of experts are kernels or other primitives, and so have names.
            experts = ("mlp_gate", "mlp_up") if self.saves_experts else ()
            named = policies.save_only_these_names(EXCHANGE_NAME, ROUTING, *experts)
            matmuls = policies.dots_with_no_batch_dims_saveable
            return _with_fused_attention(policies.save_from_both_policies(matmuls, named))
        named = policies.save_only_these_names(*self.save)
        if self.offload:
            named = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.save),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        # Saving the kernel's output alone is not enough: its backward pass also reads the softmax normalizer.
        return _with_fused_attention(named) if "context" in self.save else named


def _with_fused_attention(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The policy, also saving outputs of attention kernels: as small as their inputs, expensive to recompute."""

    def is_saveable(primitive: Any, *args: Any, **params: Any) -> Any:
        is_attention = primitive.name.startswith("dot_product_attention_fwd") or params.get("name") == CHECKPOINT_NAME
        return is_attention or policy(primitive, *args, **params)

    return is_saveable


def is_cast(weight: nnx.Variable) -> bool:
    """Whether a weight is used in the compute dtype.

    Vectors (norms), matrices marked as wide (routers) and quantized weights are used in the dtype they are stored in.
    """
    layer_axes = [name for name in weight.get_metadata("axes") if name != "layers"]
    return isinstance(weight, nnx.Param) and len(layer_axes) > 1 and not weight.get_metadata("is_wide", False)
