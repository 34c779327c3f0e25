"""A model as pure functions over a nested dict of weights: the only interface to NNX for the rest of the code.

Parameter counts and FLOPs are computed from the config without allocating weights.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import STORED_KINDS, Adapter, Quantization, QuantizationKind, QuantizationRule
from maxhydra.config.values import matches_any
from maxhydra.kernels.linear_cross_entropy import LinearHead
from maxhydra.layers import CacheSpec, Context, LoraSpec, resolve_rules
from maxhydra.layers.context import EXPERTS
from maxhydra.layers.patch_tower import image_places
from maxhydra.layers.quant.training import QuantRule, format_of
from maxhydra.layers.weight_sampler import Sizes
from maxhydra.model.decoder import BLOCKS, Decoder, DecoderSpec, ModelOutput
from maxhydra.model.mtp_cache import MTP, empty_mtp_cache, forward_with_mtp_cache, run_mtp_layer
from maxhydra.model.speech import SpeechDef
from maxhydra.sharding import Sharder, is_axes

Tree = Any
# Keys of the value head and of the modules that speak in the tree of weights.
VALUE, SPEECH = "value", "speech"
# Folded into the key of the model, for other values than those of the decoder.
SPEECH_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """A model without its weights. Nothing is allocated until `init` or `empty_cache` is called.

    Weights are nested dicts of arrays with string keys. The layers of one pattern position are stacked on a leading
    axis: `pattern/0/attention/query/kernel` is [layers, embed, heads, head_dim].
    """

    config: config.Model
    adapter: Adapter | None = None
    quantization: Quantization | None = None
    has_value_head: bool = False
    """Whether the weights include a value head, which a critic trains together with the policy; see `values_of`."""
    adapter_slots: int = 0
    """Adapters that the weights hold, one of them for each row of a batch; 0: one adapter for all rows."""

    @property
    def base(self) -> "ModelDef":
        """The model without its adapter and value head, with unquantized weights."""
        quantization = None if self.is_packed or self.quantization is None else self.quantization.without_history()
        return dataclasses.replace(self, adapter=None, quantization=quantization, has_value_head=False, adapter_slots=0)

    @property
    def is_packed(self) -> bool:
        """Whether base weights are stored quantized (INT8, INT4 or MXFP4); QLoRA's NF4 does not count."""
        return self.quantization is not None and not self.quantization.kinds.isdisjoint(STORED_KINDS)

    def is_quantized_as(self, other: Quantization) -> bool:
        """Whether every weight has the same format with `other`, even if its targets are other patterns."""
        names = [*self._abstract.projections(), *_other_parameters(self._abstract)]

        def formats(quantization: Quantization | None) -> list[QuantRule | None]:
            found = [format_of(resolve_rules(quantization), name) for name in names]
            return [rule and dataclasses.replace(rule, targets=()) for rule in found]

        return formats(self.quantization) == formats(other)

    @cached_property
    def _spec(self) -> DecoderSpec:
        return DecoderSpec.of(
            self.config, LoraSpec.of(self.adapter, self.adapter_slots), resolve_rules(self.quantization)
        )

    def is_unrolled_on(self, sharder: Sharder) -> bool:
        """Whether training on this mesh fully unrolls the scan over the layers of the pattern."""
        return self._spec.unroll_on(sharder.platform, sharder.mesh.size) == self._spec.repetitions

    @cached_property
    def _traced(self) -> tuple[Decoder, Sizes]:
        """The module with shapes instead of arrays, and the sizes of its random weights."""
        sizes: Sizes = {}
        decoder = nnx.eval_shape(lambda: Decoder(self._spec, None, sizes))
        names, parameters, problems = decoder.projections(), _other_parameters(decoder), list[Problem]()
        if self.adapter is not None:
            problems += _unmatched("adapter.targets", self.adapter.targets, names)
            problems += _unmatched("adapter.parameters", self.adapter.parameters, parameters)
        for path, rule in (self.quantization.rules if self.quantization else {}).items():
            key = ".".join(filter(None, ("quantization", path, "targets")))
            problems += _unmatched(key, rule.targets, [*names, *_other_targets(rule, parameters)])
        if problems:
            raise ConfigError(problems)
        return decoder, sizes

    @property
    def _abstract(self) -> Decoder:
        return self._traced[0]

    @cached_property
    def _graphdef(self) -> Any:
        return nnx.graphdef(self._abstract)

    @cached_property
    def shapes(self) -> Tree:
        """Tree of the shape and dtype of every weight."""
        speech = {SPEECH: self.speech.shapes} if self.speech else {}
        return {**nnx.to_pure_dict(nnx.state(self._abstract)), **jax.eval_shape(self._value_head), **speech}

    @cached_property
    def axes(self) -> Tree:
        """Tree of the logical axes of every weight."""
        weights = nnx.to_flat_state(nnx.state(self._abstract))
        axes = {path: weight.get_metadata("axes") for path, weight in weights}
        value_head = {VALUE: {"kernel": ("embed",), "bias": ()}} if self.has_value_head else {}
        speech = {SPEECH: self.speech.axes} if self.speech else {}
        return {**nnx.traversals.unflatten_mapping(axes), **value_head, **speech}

    @property
    def without_speech(self) -> "ModelDef":
        """The model without the modules that speak."""
        speech = dataclasses.replace(self.config.speech, codebooks=None)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, speech=speech))

    @cached_property
    def speech(self) -> SpeechDef | None:
        """The modules that speak, whose weights are at the key SPEECH; None for models that do not speak."""
        return None if self.config.speech.codebooks is None else SpeechDef(self.config)

    def _value_head(self) -> Tree:
        """The value head, which starts at zero; empty without one."""
        if not self.has_value_head:
            return {}
        return {VALUE: {"kernel": jnp.zeros(self.config.emb_dim, jnp.float32), "bias": jnp.zeros((), jnp.float32)}}

    @cached_property
    def _cast_weights(self) -> set[tuple[str, ...]]:
        return self._abstract.cast_weights()

    def check_mesh(self, sharder: Sharder) -> None:
        """Raise ConfigError for each axis of the mesh that does not divide the weights or the layers."""
        self._abstract.check_mesh(sharder)
        sharder.check(self.axes, self.shapes)

    def init(self, key: jax.Array) -> Tree:
        """Initial weights, independent of sharding; jit with out_shardings to create each shard on its device."""
        speech = {SPEECH: self.speech.init(jax.random.fold_in(key, SPEECH_SEED))} if self.speech else {}
        decoder = nnx.to_pure_dict(nnx.state(Decoder(self._spec, key, self._traced[1])))
        return {**decoder, **self._value_head(), **speech}

    def forward(
        self, params: Tree, tokens: jax.Array, ctx: Context, *, keep_layers: bool = False, mtp_hidden: bool = False
    ) -> ModelOutput:
        """Forward pass over tokens [B, T].

        `keep_layers`: also return the residual stream after every layer. `mtp_hidden`: also run the MTP layers.
        """
        if self.config.reads_tokens:
            ctx = dataclasses.replace(ctx, tokens=tokens)
        if ctx.cache is not None and MTP in ctx.cache:
            return forward_with_mtp_cache(self._bind(params), tokens, ctx)
        return self._bind(params)(tokens, ctx, keep_layers=keep_layers, mtp_hidden=mtp_hidden)

    def hidden(self, params: Tree, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
        """Hidden states [B, T, D] after the final norm, and the cache with these tokens.

        [B, 1, D] if ctx selects one output token per row.
        """
        output = self.forward(params, tokens, ctx)
        return output.hidden_BTD, output.cache

    @property
    def most_experts(self) -> int:
        """The largest number of experts per token of a layer; 0 without experts."""
        sections = (self.config.kinds[name].moe for name in set(self.config.layer_kinds()))
        return max((section.top_k for section in sections if section.experts is not None), default=0)

    def expert_ids(self, output: ModelOutput, ctx: Context) -> jax.Array:
        """[B, T, L, K] experts of each token in each layer, as int16, from a forward pass that recorded them.

        -1 in layers without experts, and in the last one for tokens whose output is not used.
        """
        (B, T), K, aux, spec = ctx.positions.shape, self.most_experts, output.aux, self._spec

        def whole(block: dict[str, Any], index: tuple[int, ...] = ()) -> jax.Array:
            found = [outputs[EXPERTS][index] for outputs in block.values() if EXPERTS in outputs]
            if not found:
                return jnp.full((B, T, K), -1, jnp.int16)
            ids_BTK = jnp.pad(found[0].astype(jnp.int16), [(0, 0), (0, 0), (0, K - found[0].shape[-1])])
            if ids_BTK.shape[1] == T or ctx.output_index is None:
                return ids_BTK
            return jnp.where(jnp.arange(T)[:, None] == ctx.output_index[:, None, None], ids_BTK, -1)

        def blocks(group: str) -> list[dict[str, Any]]:
            return [aux.get(group, {}).get(str(index), {}) for index in range(len(getattr(spec, group)))]

        pattern = [whole(block, (at,)) for at in range(spec.repetitions) for block in blocks("pattern")]
        layers = [*map(whole, blocks("prefix")), *pattern, *map(whole, blocks("remainder"))]
        return jnp.stack(layers, axis=2)

    def embed(self, params: Tree, tokens: jax.Array, ctx: Context) -> jax.Array:
        """Embeddings [B, T, D] of tokens, without images and audio; reads only the embedding of the weights."""
        embedding = nnx.merge(nnx.graphdef(self._abstract.embedding), params["embedding"])
        return embedding(tokens, ctx.positions, ctx)

    def axis_positions(self, tokens: jax.Array, positions: jax.Array, images: jax.Array) -> jax.Array | None:
        """[B, T, 3] positions of RoPE of tokens with images of different sizes; None if RoPE has one axis."""
        spec = self._spec.vision
        if spec is None or not spec.has_axis_positions:
            return None
        return image_places(spec, tokens, images).axis_positions(positions)

    def features(
        self, params: Tree, tokens: jax.Array, ctx: Context, layers: Sequence[int]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Hidden states as in `hidden`, and the residual stream [B, T, D] after each of the given layers."""
        output = self.forward(params, tokens, ctx, keep_layers=bool(layers))
        return output.hidden_BTD, [output.layer_outputs[layer] for layer in layers]

    def logits(self, params: Tree, hidden: jax.Array, sharder: Sharder) -> jax.Array:
        """Soft-capped logits [B, T, V] of hidden states, in dtypes.logits."""
        return self._bind(params).logits(hidden, sharder)

    def scores(self, params: Tree, hidden: jax.Array) -> jax.Array:
        """Scores [...] of hidden states [..., D], for a model with model.head=score."""
        head = self._bind(params).score
        assert head is not None
        return head(hidden)

    def lm_head(self, params: Tree, sharder: Sharder, *, is_adapted: bool = True) -> LinearHead:
        """The head as a function that also takes parts of its weights; see `logits`. `is_adapted`: with its adapter.

        Over a mesh its weights are in the compute dtype, in which they are then gathered.
        """
        compute, name = self._spec.dtypes.compute, "embedding" if self._spec.is_tied else "head"

        def apply(weights: Tree, hidden: jax.Array) -> jax.Array:
            decoder = self._bind({**params, name: {**params[name], **weights}})
            return (decoder.head or decoder.embedding).logits(hidden, is_single_device=True, is_adapted=is_adapted)

        def cast(weight: jax.Array) -> jax.Array:
            return weight.astype(compute) if weight.ndim > 1 and jnp.issubdtype(weight.dtype, jnp.floating) else weight

        weights, axes = (
            {key: tree[name][key] for key in self.axes[name] if key != "positions"} for tree in (params, self.axes)
        )
        weights = weights if sharder.mesh.size == 1 else jax.tree.map(cast, weights)
        return LinearHead(apply, weights, jax.tree.map(sharder.spec, axes, is_leaf=is_axes))

    def largest_logit(self, params: Tree, hidden_BD: jax.Array, sharder: Sharder) -> tuple[jax.Array, jax.Array]:
        """The largest logit [B] and its token [B], the first on ties; not finite if any logit is NaN.

        A kernel may compute it without writing the logits to memory.
        """
        return self._bind(params).largest_logit(hidden_BD, sharder)

    def cast(self, weights: Tree) -> Tree:
        """Weights, or a subtree of them, with the matrices of layers cast to the compute dtype.

        Layers would cast them anyway. Differentiating with respect to the result gives gradients in the compute dtype,
        which take half the bytes.
        """
        compute, paths = self._spec.dtypes.compute, self._cast_weights
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: leaf.astype(compute) if tuple(key.key for key in keys) in paths else leaf, weights
        )

    def apply_aux_updates(self, new: Tree, old: Tree, aux: Tree) -> Tree:
        """Weights after an optimizer step, with the updates that come from aux outputs instead of gradients.

        `aux`: as in ModelOutput, possibly summed over microbatches. Frozen weights are not in `new` and stay unchanged.
        """
        for group in BLOCKS:
            specs, group_aux = getattr(self._spec, group), aux.get(group, {})
            blocks = {
                index: specs[int(index)].apply_aux_updates(block, old[group][index], group_aux.get(index, {}))
                for index, block in new.get(group, {}).items()
            }
            new = {**new, group: blocks} if blocks else new
        return new

    def empty_cache(self, cache_spec: CacheSpec, *, has_mtp: bool = False) -> Tree:
        """Empty caches of all layers, each of the kind that its mixer needs.

        `has_mtp`: also of the first MTP layer, which every forward pass then updates (mtp_cache.py).
        """
        cache = self._abstract.empty_cache(cache_spec)
        return {**cache, MTP: empty_mtp_cache(self._abstract, cache_spec)} if has_mtp else cache

    def run_mtp_layer(self, params: Tree, hidden: jax.Array, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
        """Hidden states [B, T, D] of the first MTP layer, and the updated cache.

        Given hidden states at ctx.positions and the tokens [B, T] after them; the head then predicts the next ones.
        """
        return run_mtp_layer(self._bind(params), hidden, tokens, ctx)

    def _bind(self, params: Tree) -> Decoder:
        """The module bound to its weights; other entries of `params`, such as a teacher's, are ignored."""
        return nnx.merge(self._graphdef, {name: params[name] for name in self.shapes if name not in (VALUE, SPEECH)})


def build(
    model: config.Model,
    adapter: Adapter | None = None,
    quantization: Quantization | None = None,
    *,
    has_value_head: bool = False,
) -> ModelDef:
    """The model of a config, with an optional adapter, quantization and value head."""
    return ModelDef(model, adapter, quantization, has_value_head)


def values_of(params: Tree, hidden: jax.Array) -> jax.Array:
    """Values [...] of hidden states [..., D] by the value head, in float32."""
    head = params[VALUE]
    # Not a matmul, whose precision would be that of the hardware's default.
    return jnp.sum(hidden.astype(jnp.float32) * head["kernel"], axis=-1) + head["bias"]


def without_capacity_limit(model: config.Model) -> config.Model:
    """The model with dropless experts: with a capacity, outputs would depend on the padding of the batch."""
    kinds = {
        name: dataclasses.replace(kind, moe=dataclasses.replace(kind.moe, capacity_factor=None))
        for name, kind in model.kinds.items()
    }
    return dataclasses.replace(
        model, kinds=kinds, expert_parallel=dataclasses.replace(model.expert_parallel, buffer=None)
    )


def _other_parameters(decoder: Decoder) -> list[str]:
    """Names of the weights other than projections that adapters and some quantization rules may target."""
    return ["embedding", *(["head"] if decoder.head else []), *decoder.expert_maps()]


def _other_targets(rule: QuantizationRule, parameters: list[str]) -> list[str]:
    """Those of the other weights that a rule may target.

    Matmuls of experts, embedding and head run in model.dtypes.compute, so only weight storage formats apply to them.
    """
    is_int8 = rule.kind in (QuantizationKind.int8_weights, QuantizationKind.qat_int8)
    has_4_bits = rule.kind in (QuantizationKind.int4_weights, QuantizationKind.qat_int4, QuantizationKind.mxfp4_weights)
    return [name for name in parameters if is_int8 or (has_4_bits and "/" in name)]


def _unmatched(key: str, targets: list[str] | None, names: list[str]) -> Iterator[Problem]:
    """Problems for targets that match no name: a typo would silently quantize or train less than intended."""
    unmatched = [target for target in targets or [] if not any(matches_any([target], name) for name in names)]
    hint = "correct or remove it; the others match" if len(unmatched) < len(targets or []) else ""
    for target in unmatched:
        accepted = f"regular expressions on {', '.join(dict.fromkeys(names))}"
        what = "weight" if key == "adapter.parameters" else "projection"
        yield Problem(key, f"no {what}'s name matches {target!r}", value=targets, accepted=accepted, hint=hint)


def parameter_count(shapes: Any) -> int:
    """Number of weights in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def active_parameters(model: config.Model) -> int:
    """Number of weights used per token, including embedding and head: all but the experts it is not routed to."""
    spec = DecoderSpec.of(model)
    idle = sum(layer.idle_parameters() for layer in spec.layers)
    if model.mtp.depth:
        idle += model.mtp.depth * spec.layers[-1].idle_parameters()
    return parameter_count(build(model).shapes) - idle


def flops_per_token(model: config.Model, seq_len: int, *, has_adapter: bool = False) -> float:
    """Model FLOPs per token of one training step, forward and backward.

    A matmul costs a token 2 FLOPs per weight, and the backward pass twice as many again: one half for the gradient of
    its input, the other for that of its weights. With an adapter the latter is not computed, and the adapter's own
    matmuls are not counted. Rematerialization, masked logits, norms and activations are not counted either, so an MFU
    based on this number is comparable between implementations.
    """
    forward = _forward_flops(model, seq_len)
    # A sequence of one token costs its matmuls with weights.
    return 3 * forward - _forward_flops(model, 1) if has_adapter else 3 * forward


def _forward_flops(model: config.Model, seq_len: int) -> float:
    spec = DecoderSpec.of(model)
    head = model.emb_dim * (1 if spec.has_score else model.vocab_size)
    forward = 2.0 * head + sum(layer.forward_flops(seq_len) for layer in spec.layers)
    if model.mtp.depth:
        forward += model.mtp.depth * (spec.layers[-1].forward_flops(seq_len) + 2 * head + 4 * model.emb_dim**2)
    return forward
