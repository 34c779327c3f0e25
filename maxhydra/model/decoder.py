"""The decoder: embedding, prefix layers, a scan over repetitions of the pattern, remainder layers, final norm, head.

Every position of the pattern is one block with weights stacked over the repetitions, so compile time does not grow with
depth. The decoder depends neither on what its blocks compute nor on what their caches hold. B batch, T tokens, D
residual stream, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.matmul import Layout
from maxhydra.layers import (
    Cache,
    CacheSpec,
    Context,
    Dtypes,
    Embedding,
    ExpertLinear,
    Head,
    Linear,
    LoraSpec,
    MatmulSpec,
    NormSpec,
    ParamBuilder,
    PerLayerEmbedding,
    PerLayerSpec,
    QuantRule,
    ScoreHead,
    VisionSpec,
    VocabularySpec,
    with_aux_losses,
)
from maxhydra.layers.audio import AudioSpec
from maxhydra.layers.conformer import ConformerSpec, audio_spec, build_audio_tower
from maxhydra.layers.hyper_connections import HyperSpec, StreamHead, expand_streams, sum_streams
from maxhydra.layers.patch_tower import build_vision_tower
from maxhydra.layers.weight_sampler import Sizes
from maxhydra.model.block import Block, BlockOutput, BlockSpec, Mtp, Remat, is_cast
from maxhydra.model.fused_block import NormHandoff, block_class, embed_with_norm
from maxhydra.model.pattern import (
    Pattern,
    Repetitions,
    StackOutput,
    as_function,
    as_traced_once,
    by_layer,
    cache_view,
    merge_view,
)
from maxhydra.model.pipeline import check_stages, run_pipeline, shard_over_embed
from maxhydra.sharding import Sharder

# Attributes of the decoder that hold its blocks.
BLOCKS = ("prefix", "pattern", "remainder", "mtp")

# Layers that are unrolled by default. Each adds about 0.2 s of compilation, with experts 3.5 s.
UNROLLED_LAYERS, UNROLLED_EXPERT_LAYERS = 48, 16
LAYERS_IN_ITERATION = 2


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """The model config, resolved: the block of every layer, embedding, norm, head."""

    prefix: tuple[BlockSpec, ...]
    pattern: tuple[BlockSpec, ...]
    repetitions: int
    remainder: tuple[BlockSpec, ...]
    mtp: tuple[BlockSpec, ...]
    """Multi-token prediction layers after the last (mtp.py)."""
    vocabulary: VocabularySpec
    per_layer: PerLayerSpec | None
    hyper: HyperSpec | None
    vision: VisionSpec | None
    audio: AudioSpec | ConformerSpec | None
    is_tied: bool
    has_score: bool
    """Whether the head is that of a reward model."""
    norm: NormSpec
    unroll: int | None
    """Repetitions per iteration of the scan over them; None: see `unroll_on`."""
    is_unrollable: bool
    """Whether unrolling all of them compiles in reasonable time."""
    remat: Remat
    matmul_spec: MatmulSpec
    dtypes: Dtypes

    @classmethod
    def of(
        cls,
        model: config.Model,
        lora: LoraSpec | None = None,
        formats: tuple[QuantRule, ...] = (),
    ) -> "DecoderSpec":
        remaining = model.num_layers - len(model.prefix)
        repetitions, rest = divmod(remaining, len(model.pattern)) if remaining else (0, 0)
        pattern = tuple(BlockSpec.of(model, name) for name in model.pattern)
        prefix = tuple(BlockSpec.of(model, name) for name in model.prefix)
        return cls(
            prefix=prefix,
            pattern=pattern if repetitions else (),
            repetitions=repetitions,
            remainder=pattern[:rest],
            mtp=(BlockSpec.of(model, model.layer_kinds()[-1]),) * model.mtp.depth,
            vocabulary=VocabularySpec.of(model),
            per_layer=PerLayerSpec.of(model),
            hyper=HyperSpec.of(model),
            vision=VisionSpec.of(model),
            audio=audio_spec(model),
            is_tied=model.head is config.Head.tied,
            has_score=model.head is config.Head.score,
            norm=NormSpec.of(model),
            unroll=None if model.scan_unroll is None else max(1, min(model.scan_unroll, repetitions)),
            is_unrollable=model.num_layers <= (UNROLLED_EXPERT_LAYERS if model.has_experts else UNROLLED_LAYERS),
            remat=Remat.of(model.remat),
            matmul_spec=MatmulSpec(
                compute=Dtypes.of(model.dtypes).compute,
                layout=Layout(model.kernels.projection.value),
                is_fused=model.kernels.fused_linear is config.FusedLinearBackend.auto,
                lora=lora,
                formats=formats,
            ),
            dtypes=Dtypes.of(model.dtypes),
        )

    def unroll_on(self, platform: str, num_devices: int, *, is_cached: bool = False) -> int:
        """Repetitions per iteration of the scan over them.

        On one GPU a loop over stacked weights and activations copies a slice of each in every iteration: unrolled, a
        training step of a 1B takes 6 % less time, and one of a mixture of experts 10 %. On several GPUs an iteration
        has at least two layers, so that the weights of the second are gathered while the first computes
        (docs/lab/aot.md). With a cache, layers stay in a loop, because an engine compiles dozens of programs.
        """
        if self.unroll is not None:
            return self.unroll
        if platform != "gpu" or is_cached or not self.repetitions:
            return 1
        if num_devices == 1:
            return self.repetitions if self.is_unrollable else 1
        return min(self.repetitions, math.ceil(LAYERS_IN_ITERATION / len(self.pattern)))

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        """The spec of every layer from first to last."""
        return self.prefix + self.pattern * self.repetitions + self.remainder


class ModelOutput(NamedTuple):
    """What a forward pass returns."""

    hidden_BTD: jax.Array
    """Hidden states after the final norm."""
    cache: Any
    """The updated cache; None without one."""
    layer_outputs: list[jax.Array]
    """The residual stream after every layer, if requested."""
    aux: dict[str, Any]
    """Aux outputs (layers/context.py) at the path of the sub-layer in the parameter tree; those of the pattern are
    stacked over its repetitions."""
    mtp_hidden: list[jax.Array]
    """Hidden states of the multi-token prediction layers (mtp.py), if requested."""


class Decoder(nnx.Module):
    """Maps tokens to hidden states, and hidden states to logits."""

    def __init__(self, spec: DecoderSpec, key: jax.Array | None, sizes: Sizes):
        self.spec = spec
        make = ParamBuilder(key, dtype=spec.dtypes.weights, layers=None, matmul_spec=spec.matmul_spec, sizes=sizes)
        self.embedding = Embedding(spec.vocabulary, make)
        per_layer = spec.per_layer
        self.per_layer = None if per_layer is None else PerLayerEmbedding(per_layer, make.below("per_layer"))
        self.prefix = self._build_blocks(spec.prefix, make)
        self.pattern = self._build_blocks(spec.pattern, make.stacked(spec.repetitions))
        self.remainder = self._build_blocks(spec.remainder, make)
        self.stream_head = StreamHead(spec.hyper, make) if spec.hyper and spec.hyper.is_weighted else None
        self.final_norm = spec.norm.build(spec.vocabulary.emb_dim, make)
        self.head = None if spec.is_tied or spec.has_score else Head(spec.vocabulary, make)
        self.score = ScoreHead(spec.vocabulary, make) if spec.has_score else None
        scale = spec.vocabulary.init_scale
        self.vision = build_vision_tower(spec.vision, make.below("vision"))
        self.audio = build_audio_tower(spec.audio, make.below("audio"))
        self.mtp = _numbered([Mtp(block, make.below("mtp"), scale=scale) for block in spec.mtp])

    def __call__(self, tokens_BT: jax.Array, ctx: Context, *, keep_layers: bool, mtp_hidden: bool) -> ModelOutput:
        """Run a forward pass.

        `keep_layers`: also return the residual stream after every layer. `mtp_hidden`: also run the MTP layers.
        """
        caches = ctx.cache or self._map_blocks(lambda block, layers: None)
        x_BTD, first_norm_BTD, ctx = self._embed(tokens_BT, ctx)
        if self.per_layer is not None:
            ctx = dataclasses.replace(ctx, layer_input=self.per_layer(tokens_BT, x_BTD, ctx))
        prefix = self._run_blocks(self.prefix, x_BTD, ctx, caches["prefix"], first_norm_BTD, first=0)
        pattern = self._run_pattern(prefix.x_BTD, prefix.ctx, caches["pattern"], keep_layers=keep_layers)
        spec, first = self.spec, len(self.spec.layers) - len(self.remainder)
        remainder = self._run_blocks(self.remainder, pattern.x_BTD, pattern.ctx, caches["remainder"], None, first=first)
        stacks = {"prefix": prefix, "pattern": pattern, "remainder": remainder}
        x_BTD = remainder.ctx.select_output_tokens(remainder.x_BTD)
        x_BTD = sum_streams(x_BTD, spec.hyper) if self.stream_head is None else self.stream_head(x_BTD)
        hidden_BTD = ctx.constrain_stream(self.final_norm(x_BTD) * spec.vocabulary.hidden_factor)
        mtp = self._run_mtp(hidden_BTD, tokens_BT, ctx) if mtp_hidden else StackOutput(hidden_BTD, [], [], {}, ctx)
        return ModelOutput(
            hidden_BTD=hidden_BTD,
            cache=None if ctx.cache is None else {name: stack.caches for name, stack in stacks.items()},
            layer_outputs=[sum_streams(x, spec.hyper) for s in stacks.values() for x in s.layer_outputs if keep_layers],
            aux=with_aux_losses({name: stack.aux for name, stack in {**stacks, "mtp": mtp}.items() if stack.aux}),
            mtp_hidden=mtp.layer_outputs,
        )

    def _build_blocks(self, specs: Sequence[BlockSpec], make: ParamBuilder) -> nnx.Dict:
        return _numbered([block_class(spec, self.spec.matmul_spec)(spec, make.below(spec.name)) for spec in specs])

    def _embed(self, tokens_BT: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array | None, Context]:
        """Embeddings of tokens and media, the first layer's norm of them if fused, and the context of the layers."""
        if ctx.images is None and ctx.audio is None:
            if (fused := embed_with_norm(self.embedding, tokens_BT, _in_order(self.prefix), ctx)) is not None:
                return *fused, ctx
            x_BTD = self.embedding(tokens_BT, ctx.positions, ctx)
        else:
            x_BTD = self.embedding(tokens_BT, ctx.positions, ctx)
            wrap = functools.partial(self.spec.remat.wrap, in_loop=True)
            if ctx.images is not None:
                assert self.vision is not None
                x_BTD, ctx = self.vision.embed(x_BTD, tokens_BT, ctx, wrap)
            if ctx.audio is not None:
                assert self.audio is not None
                x_BTD, ctx = self.audio.embed(x_BTD, tokens_BT, ctx, wrap)
        return ctx.constrain_stream(expand_streams(x_BTD, self.spec.hyper)), None, ctx

    def logits(self, hidden: jax.Array, sharder: Sharder) -> jax.Array:
        """Soft-capped logits [B, T, V] of hidden states [B, T, D]; T is sharded if it is divisible."""
        length = "act_length" if hidden.shape[1] % sharder.num_shards("act_length") == 0 else None
        logits = (self.head or self.embedding).logits(hidden, is_single_device=sharder.mesh.size == 1)
        return sharder.constrain(logits, "act_batch", length, "act_vocab")

    def largest_logit(self, hidden_BD: jax.Array, sharder: Sharder) -> tuple[jax.Array, jax.Array]:
        """The largest logit [B] of hidden states [B, D], and its token [B]."""
        head, is_single_device = self.head or self.embedding, sharder.mesh.size == 1
        fused = head.largest_logit(hidden_BD) if is_single_device and self.spec.matmul_spec.is_fused else None
        if fused is not None:
            return fused
        logits_BV = self.logits(hidden_BD[:, None], sharder)[:, 0]
        return jnp.max(logits_BV, axis=-1), jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def empty_cache(self, cache_spec: CacheSpec) -> dict[str, list[Cache]]:
        """Empty caches of all blocks; those of the pattern are stacked over its repetitions."""
        return self._map_blocks(lambda block, layers: block.empty_cache(cache_spec, layers))

    def projections(self) -> list[str]:
        """Names of all linear projections."""
        return [module.name for _, module in nnx.iter_modules(self) if isinstance(module, Linear)]

    def expert_maps(self) -> list[str]:
        """Names of all linear projections of experts."""
        return [module.name for _, module in nnx.iter_modules(self) if isinstance(module, ExpertLinear)]

    def check_mesh(self, sharder: Sharder) -> None:
        """Raise ConfigError unless the layers divide into the pipeline stages of the mesh."""
        check_stages(self.spec.repetitions, sharder)

    def cast_weights(self) -> set[tuple[str, ...]]:
        """Paths of the weights that blocks use in the compute dtype."""
        weights = ((path, weight) for path, weight in nnx.to_flat_state(nnx.state(self)) if path[0] in BLOCKS)
        return {path for path, weight in weights if is_cast(weight)}

    def _map_blocks(self, function: Callable[[Block, int], Any]) -> dict[str, list[Any]]:
        """Apply a function to every block and its number of layers."""
        groups = {"prefix": (self.prefix, 1), "pattern": (self.pattern, self.spec.repetitions)}
        groups["remainder"] = (self.remainder, 1)
        return {
            name: [function(block, layers) for block in _in_order(blocks)] for name, (blocks, layers) in groups.items()
        }

    def _run_blocks(
        self,
        blocks: nnx.Dict,
        x_BTD: jax.Array,
        ctx: Context,
        caches: list[Any],
        normed_BTD: jax.Array | None,
        *,
        first: int,
    ) -> StackOutput:
        """Run blocks in sequence; the first has layer index `first`, and `normed_BTD` is its norm of x if known."""
        new_caches, layer_outputs, aux = [], [], []
        handoff = NormHandoff(_in_order(blocks), ctx, normed_BTD)
        for index, (block, cache) in enumerate(zip(_in_order(blocks), caches, strict=True)):
            layer, graphdef, weights = first + index, *self._split(block)
            method, extra = handoff.inputs(index)
            run = self._run_function(graphdef, method, ctx, is_cached=cache is not None)
            is_last = layer == len(self.spec.layers) - 1
            inputs = [None if x is None else x[layer] for x in ctx.layer_inputs]
            layer_ctx = ctx if is_last else dataclasses.replace(ctx, output_index=None)
            layer_ctx = layer_ctx.at_layer(layer, cache_view(cache, 0), *inputs)
            out = handoff.output(run(weights, x_BTD, layer_ctx, *extra))
            if out.shared is not None:
                ctx = dataclasses.replace(ctx, shared={**ctx.shared, block.name: out.shared})
            if is_last:
                # The last layer has already reduced the stream to the output tokens.
                ctx = dataclasses.replace(ctx, output_index=None)
            x_BTD = ctx.add_deepstack(out.x_BTD, layer)
            new_caches.append(merge_view(cache, out.cache))
            layer_outputs.append(x_BTD)
            aux.append(out.aux)
        return StackOutput(x_BTD, new_caches, layer_outputs, by_layer(aux), ctx)

    def _run_function(self, graphdef: Any, method: Callable[..., Any], ctx: Context, *, is_cached: bool) -> Any:
        """A block outside of the scan as a function; equal blocks of a forward pass with a cache are traced once."""
        if is_cached:
            return as_traced_once(graphdef, method)
        return self.spec.remat.on(ctx.sharder).wrap(as_function(graphdef, method), in_loop=False)

    def _run_mtp(self, x_BTD: jax.Array, tokens_BT: jax.Array, ctx: Context) -> StackOutput:
        """Run the MTP layers, each on the output of the one before it.

        At the end of a row there are no later tokens, and the row's first tokens take their place: no earlier position
        attends to them, and the loss does not count them.
        """
        outputs, aux = [], []
        for index in range(len(self.mtp)):
            out = self.predict_mtp(index, x_BTD, jnp.roll(tokens_BT, -1 - index, axis=1), ctx, None)
            x_BTD = out.x_BTD
            outputs.append(x_BTD)
            aux.append(out.aux)
        return StackOutput(x_BTD, [], outputs, by_layer(aux), ctx)

    def predict_mtp(
        self, index: int, x_BTD: jax.Array, later_BT: jax.Array, ctx: Context, cache: Cache | None
    ) -> BlockOutput:
        """Run one MTP layer on hidden states, the tokens that are 1 + `index` positions later, and its cache if any."""
        later_BTD = self.embedding(later_BT, ctx.positions + 1 + index, ctx)
        graphdef, weights = self._split(self.mtp[str(index)])
        run = self._run_function(graphdef, Mtp.predict, ctx, is_cached=cache is not None)
        layer_ctx = ctx.at_layer(len(self.spec.layers) + index, cache_view(cache, 0), None)
        out: BlockOutput = run(weights, x_BTD, later_BTD, layer_ctx)
        return out._replace(cache=merge_view(cache, out.cache))

    def _split(self, block: Block) -> tuple[Any, nnx.State]:
        """The graph definition of a block, and its weights, with matrices in the compute dtype.

        They are cast here, outside the rematerialized function, unless that was done before: a layer that casts its own
        weights does so twice, and its gradient takes twice the bytes.
        """
        graphdef, weights = nnx.split(block)

        def cast(weight: nnx.Variable) -> nnx.Variable:
            return weight.replace(weight[...].astype(self.spec.dtypes.compute)) if is_cast(weight) else weight

        return graphdef, jax.tree.map(cast, weights, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def _run_pattern(self, x_BTD: jax.Array, ctx: Context, caches: list[Any], *, keep_layers: bool) -> StackOutput:
        """Run all repetitions of the pattern: in one scan, or without caches over the stages of a pipeline."""
        spec = self.spec
        if not spec.repetitions:
            return StackOutput(x_BTD, caches, [], {}, ctx)
        splits = [self._split(block) for block in _in_order(self.pattern)]
        is_pipelined = ctx.sharder.stages > 1 and ctx.cache is None
        unroll = spec.unroll_on(ctx.sharder.platform, ctx.sharder.mesh.size, is_cached=ctx.cache is not None)
        in_loop = is_pipelined or unroll != spec.repetitions
        runs = [spec.remat.on(ctx.sharder).wrap(as_function(graphdef), in_loop=in_loop) for graphdef, _ in splits]
        names = [block.name for block in spec.pattern]
        pattern = Pattern(runs, names, first=len(self.prefix), keep_layers=keep_layers, unroll=unroll)
        weights = [weights for _, weights in splits]
        if ctx.sharder.stages > 1 and not is_pipelined:
            weights = [shard_over_embed(weights, ctx.sharder) for weights in weights]
        repetitions = Repetitions(jnp.arange(spec.repetitions), weights, self._pattern_inputs(ctx))
        if is_pipelined:
            out = run_pipeline(pattern, x_BTD, ctx, repetitions, accum_dtype=spec.dtypes.weights)
        else:
            out = pattern.scan(x_BTD, ctx, caches, repetitions)
        layer_outputs = [outputs[index] for index in range(spec.repetitions) for outputs in out.layer_outputs]
        return StackOutput(out.x_BTD, out.caches, layer_outputs, by_layer(out.aux), ctx)

    def _pattern_inputs(self, ctx: Context) -> Any:
        """Layer inputs of the pattern's layers, [repetitions, positions, B, T, ...]."""
        first, positions, repetitions = len(self.prefix), len(self.pattern), self.spec.repetitions

        def stack(x: jax.Array) -> jax.Array:
            return x[first : first + repetitions * positions].reshape(repetitions, positions, *x.shape[1:])

        return jax.tree.map(stack, ctx.layer_inputs)


def _numbered(blocks: Sequence[Block]) -> nnx.Dict:
    """Blocks under the keys "0", "1", ...: string keys are the same in every checkpoint format."""
    return nnx.Dict({str(index): block for index, block in enumerate(blocks)})


def _in_order(blocks: nnx.Dict) -> list[Any]:
    return [blocks[str(index)] for index in range(len(blocks))]
