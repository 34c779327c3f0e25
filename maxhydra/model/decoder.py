"""The decoder: embedding, prefix, repetitions of the pattern under one scan, remainder, final norm, head.

Every position of the pattern is one block whose weights are stacked over the repetitions, so that compile time does not
grow with depth. The decoder knows neither what its blocks do nor what their caches hold. B batch, T tokens, D residual
stream.
"""

import dataclasses
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
    VocabularySpec,
)
from maxhydra.model.block import Block, BlockOutput, BlockSpec
from maxhydra.model.mtp import Mtp
from maxhydra.model.remat import Remat
from maxhydra.sharding import Sharder

# The parts of a decoder that hold its blocks.
BLOCKS = ("prefix", "pattern", "remainder", "mtp")


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """The model config, resolved: which block stands where."""

    prefix: tuple[BlockSpec, ...]
    pattern: tuple[BlockSpec, ...]
    repetitions: int
    remainder: tuple[BlockSpec, ...]
    mtp: tuple[BlockSpec, ...]
    """Layers behind the last, which predict tokens beyond the next."""
    vocabulary: VocabularySpec
    per_layer: PerLayerSpec | None
    is_tied: bool
    norm: NormSpec
    unroll: int
    remat: Remat
    product: MatmulSpec
    dtypes: Dtypes

    @classmethod
    def of(
        cls,
        model: config.Model,
        lora: LoraSpec | None = None,
        formats: tuple[QuantRule, ...] = (),
    ) -> "DecoderSpec":
        repeated = model.num_layers - len(model.prefix)
        repetitions, rest = divmod(repeated, len(model.pattern)) if repeated else (0, 0)
        pattern = tuple(BlockSpec.of(model, name) for name in model.pattern)
        prefix = tuple(BlockSpec.of(model, name) for name in model.prefix)
        last = (prefix + pattern * repetitions + pattern[:rest])[-1]
        return cls(
            prefix=prefix,
            pattern=pattern if repetitions else (),
            repetitions=repetitions,
            remainder=pattern[:rest],
            mtp=(last,) * model.mtp.depth,
            vocabulary=VocabularySpec.of(model),
            per_layer=PerLayerSpec.of(model),
            is_tied=model.head is config.Head.tied,
            norm=NormSpec.of(model),
            unroll=max(1, min(model.scan_unroll, repetitions)),
            remat=Remat.of(model.remat),
            product=MatmulSpec(
                compute=Dtypes.of(model.dtypes).compute,
                layout=Layout(model.kernels.projection.value),
                is_fused=model.kernels.fused_linear is config.FusedLinearBackend.auto,
                lora=lora,
                formats=formats,
            ),
            dtypes=Dtypes.of(model.dtypes),
        )

    @property
    def is_written_out(self) -> bool:
        """Whether the repetitions stand one after the other in the program, and not in a loop."""
        return self.unroll == self.repetitions

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        """Every layer from first to last."""
        return self.prefix + self.pattern * self.repetitions + self.remainder


class ModelOutput(NamedTuple):
    """What a forward pass gives."""

    hidden_BTD: jax.Array
    """Hidden states after the final norm."""
    cache: Any
    """The new cache; None without one."""
    kept: list[jax.Array]
    """The residual stream after every layer, where it was asked for."""
    sides: dict[str, Any]
    """What layers tell besides (layers/interfaces.py), at the path of the layer's part among the weights; those of the
    pattern stacked over its repetitions."""
    ahead: list[jax.Array]
    """What the layers behind the last (mtp.py) give to the head, where it was asked for."""


class StackOutput(NamedTuple):
    """What some of the layers leave."""

    x_BTD: jax.Array
    caches: list[Any]
    kept: list[jax.Array]
    sides: dict[str, Any]
    ctx: Context
    """With what these layers handed on to later ones."""


class Decoder(nnx.Module):
    """Tokens to hidden states, and hidden states to logits."""

    def __init__(self, spec: DecoderSpec, key: jax.Array):
        self.spec = spec
        make = ParamBuilder(key, dtype=spec.dtypes.weights, layers=None, product=spec.product)
        self.embedding = Embedding(spec.vocabulary, make)
        own = spec.per_layer
        self.per_layer = None if own is None else PerLayerEmbedding(own, make.below("per_layer"))
        self.prefix = _numbered([Block(block, make.below(block.name)) for block in spec.prefix])
        stacks = [make.stacked(spec.repetitions).below(block.name) for block in spec.pattern]
        self.pattern = _numbered([Block(block, stack) for block, stack in zip(spec.pattern, stacks, strict=True)])
        self.remainder = _numbered([Block(block, make.below(block.name)) for block in spec.remainder])
        self.final_norm = spec.norm.build(spec.vocabulary.emb_dim, make)
        self.head = None if spec.is_tied else Head(spec.vocabulary, make)
        scale = spec.vocabulary.init_scale
        self.mtp = _numbered([Mtp(block, make.below("mtp"), scale=scale) for block in spec.mtp])

    def __call__(self, tokens_BT: jax.Array, ctx: Context, *, keep: bool, ahead: bool) -> ModelOutput:
        """A forward pass, which leaves the stream after every layer only where asked to `keep` it, and runs the layers
        behind the last only where asked to look `ahead`."""
        caches = ctx.cache or self._map_blocks(lambda block, layers: None)
        x_BTD, ctx = self._embedded(tokens_BT, ctx)
        if self.per_layer is not None:
            ctx = dataclasses.replace(ctx, layer_input=self.per_layer(tokens_BT, x_BTD, ctx))
        prefix = self._run_blocks(self.prefix, x_BTD, ctx, caches["prefix"], first=0)
        pattern = self._run_pattern(prefix.x_BTD, prefix.ctx, caches["pattern"], keep=keep)
        first = len(self.spec.layers) - len(self.remainder)
        remainder = self._run_blocks(self.remainder, pattern.x_BTD, pattern.ctx, caches["remainder"], first=first)
        parts = {"prefix": prefix, "pattern": pattern, "remainder": remainder}
        asked_BTD = remainder.ctx.taken(remainder.x_BTD)
        hidden_BTD = ctx.constrain(self.final_norm(asked_BTD), "act_batch", "act_length", "act_embed")
        further = self._run_ahead(hidden_BTD, tokens_BT, ctx) if ahead else StackOutput(hidden_BTD, [], [], {}, ctx)
        return ModelOutput(
            hidden_BTD=hidden_BTD,
            cache=None if ctx.cache is None else {name: part.caches for name, part in parts.items()},
            kept=[x_BTD for part in parts.values() for x_BTD in part.kept] if keep else [],
            sides={name: part.sides for name, part in {**parts, "mtp": further}.items() if part.sides},
            ahead=further.kept,
        )

    def _embedded(self, tokens_BT: jax.Array, ctx: Context) -> tuple[jax.Array, Context]:
        """The stream that the first layer finds, perhaps with what its first norm makes of it."""
        first = _in_order(self.prefix)[0].first_norm() if self.prefix and self.spec.product.is_fused else None
        if first is not None and ctx.cache is not None and ctx.sharder.mesh.size == 1:
            found = self.embedding.begun(tokens_BT, first)
            if found is not None:
                return found[0], dataclasses.replace(ctx, normed=found[1])
        return ctx.constrain(self.embedding(tokens_BT, ctx.positions), "act_batch", "act_length", "act_embed"), ctx

    def logits(self, hidden: jax.Array, sharder: Sharder) -> jax.Array:
        """[B, T, D] to [B, T, V], soft-capped; T may be any part of the sequence, and is split if it can be."""
        length = "act_length" if hidden.shape[1] % sharder.ways("act_length") == 0 else None
        logits = (self.head or self.embedding).logits(hidden, is_alone=sharder.mesh.size == 1)
        return sharder.constrain(logits, "act_batch", length, "act_vocab")

    def largest_logit(self, hidden_BD: jax.Array, sharder: Sharder) -> tuple[jax.Array, jax.Array]:
        """[B, D] to the largest logit of each row, and the token it belongs to."""
        end, is_alone = self.head or self.embedding, sharder.mesh.size == 1
        found = end.largest_logit(hidden_BD) if is_alone and self.spec.product.is_fused else None
        if found is not None:
            return found
        logits_BV = self.logits(hidden_BD[:, None], sharder)[:, 0]
        return jnp.max(logits_BV, axis=-1), jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def empty_cache(self, room: CacheSpec) -> dict[str, list[Cache]]:
        """The caches of all blocks; those of the pattern hold every repetition, the others one layer."""
        return self._map_blocks(lambda block, layers: block.empty_cache(room, layers))

    def projections(self) -> list[str]:
        """The name of every linear map of every block."""
        return [module.name for _, module in nnx.iter_modules(self) if isinstance(module, Linear)]

    def expert_maps(self) -> list[str]:
        """The name of every linear map of experts."""
        return [module.name for _, module in nnx.iter_modules(self) if isinstance(module, ExpertLinear)]

    def cast_weights(self) -> set[tuple[str, ...]]:
        """Where the weights lie that blocks use in the compute format."""
        weights = ((path, weight) for path, weight in nnx.to_flat_state(nnx.state(self)) if path[0] in BLOCKS)
        return {path for path, weight in weights if _is_cast(weight)}

    def _map_blocks(self, function: Callable[[Block, int], Any]) -> dict[str, list[Any]]:
        """A function of every block and the layers that it stands for."""
        groups = {"prefix": (self.prefix, 1), "pattern": (self.pattern, self.spec.repetitions)}
        groups["remainder"] = (self.remainder, 1)
        return {
            name: [function(block, layers) for block in _in_order(blocks)] for name, (blocks, layers) in groups.items()
        }

    def _run_blocks(
        self, blocks: nnx.Dict, x_BTD: jax.Array, ctx: Context, caches: list[Any], *, first: int
    ) -> StackOutput:
        """Blocks one after the other, the first of them layer number `first`."""
        new_caches, kept, sides = [], [], []
        normed, ctx = ctx.normed, dataclasses.replace(ctx, normed=None)
        norms = [block.first_norm() for block in _in_order(blocks)[1:]] if ctx.cache is not None else []
        scales = [None if norm is None else norm.scale_K for norm in norms]
        for index, (block, cache) in enumerate(zip(_in_order(blocks), caches, strict=True), start=first):
            graphdef, weights = self._split(block)
            run = self.spec.remat.wrap(_runner(graphdef), in_loop=False)
            own_input = None if ctx.layer_input is None else ctx.layer_input[index]
            following = scales[index - first] if index - first < len(scales) else None
            is_last = index == len(self.spec.layers) - 1
            own = dataclasses.replace(ctx, normed=normed, following=following, asked=ctx.asked if is_last else None)
            x_BTD, view, side, handed, normed = run(weights, x_BTD, own.at_layer(index, _seen(cache, 0), own_input))
            if handed is not None:
                ctx = dataclasses.replace(ctx, shared={**ctx.shared, block.name: handed})
            if is_last:
                # The layer has taken the tokens that are asked for.
                ctx = dataclasses.replace(ctx, asked=None)
            new_caches.append(_merged(cache, view))
            kept.append(x_BTD)
            sides.append(side)
        return StackOutput(x_BTD, new_caches, kept, _told(sides), ctx)

    def _run_ahead(self, x_BTD: jax.Array, tokens_BT: jax.Array, ctx: Context) -> StackOutput:
        """The layers behind the last, each on what the one before it made. At the end of a row there are no later
        tokens, and the first ones stand in for them: nothing earlier sees it, and no loss counts it."""
        kept, sides = [], []
        for index, layer in enumerate(_in_order(self.mtp)):
            later_BTD = self.embedding(jnp.roll(tokens_BT, -1 - index, axis=1), ctx.positions + 1 + index)
            graphdef, weights = self._split(layer)
            run = self.spec.remat.wrap(_runner(graphdef, Mtp.ahead), in_loop=False)
            own_ctx = ctx.at_layer(len(self.spec.layers) + index, None, None)
            x_BTD, _, side, *_ = run(weights, x_BTD, later_BTD, own_ctx)
            kept.append(x_BTD)
            sides.append(side)
        return StackOutput(x_BTD, [], kept, _told(sides), ctx)

    def _split(self, block: Block) -> tuple[Any, nnx.State]:
        """The block without its weights, and the weights, matrices in the compute format.

        They are cast here, outside what is computed again, unless that was done before: a layer that casts its own does
        it twice, and hands back a gradient of twice the bytes.
        """
        graphdef, weights = nnx.split(block)

        def cast(weight: nnx.Variable) -> nnx.Variable:
            return weight.replace(weight[...].astype(self.spec.dtypes.compute)) if _is_cast(weight) else weight

        return graphdef, jax.tree.map(cast, weights, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def _run_pattern(self, x_BTD: jax.Array, ctx: Context, caches: list[Any], *, keep: bool) -> StackOutput:
        """All repetitions of the pattern under one scan.

        The caches are carried and updated in place rather than scanned over, which would hold them twice. Nothing is
        handed on from here: what layers share comes from the prefix.
        """
        spec = self.spec
        if not spec.repetitions:
            return StackOutput(x_BTD, caches, [], {}, ctx)
        splits = [self._split(block) for block in _in_order(self.pattern)]
        in_loop = not spec.is_written_out
        runs = [spec.remat.wrap(_runner(graphdef), in_loop=in_loop) for graphdef, _ in splits]

        def repetition(carry: tuple[jax.Array, list[Any]], xs: tuple[jax.Array, list[Any], Any]) -> tuple[Any, Any]:
            (x_BTD, caches), (index, weights, inputs) = carry, xs
            new_caches, kept, sides = [], [], []
            for place, (run, cache) in enumerate(zip(runs, caches, strict=True)):
                layer = len(self.prefix) + index * len(runs) + place
                own_input = None if inputs is None else inputs[place]
                own_ctx = dataclasses.replace(ctx, asked=None).at_layer(layer, _seen(cache, index), own_input)
                x_BTD, view, side, *_ = run(weights[place], x_BTD, own_ctx)
                new_caches.append(_merged(cache, view))
                kept.append(x_BTD)
                sides.append(side)
            return (x_BTD, new_caches), (kept if keep else [], sides)

        xs = (jnp.arange(spec.repetitions), [weights for _, weights in splits], self._pattern_inputs(ctx))
        (x_BTD, caches), (kept, sides) = jax.lax.scan(repetition, (x_BTD, caches), xs, unroll=spec.unroll)
        in_order = [place[index] for index in range(spec.repetitions) for place in kept]
        return StackOutput(x_BTD, caches, in_order, _told(sides), ctx)

    def _pattern_inputs(self, ctx: Context) -> jax.Array | None:
        """The inputs of the pattern's layers, [repetitions, places, B, T, P]."""
        if ctx.layer_input is None:
            return None
        places = len(self.pattern)
        own = ctx.layer_input[len(self.prefix) : len(self.prefix) + self.spec.repetitions * places]
        return own.reshape(self.spec.repetitions, places, *own.shape[1:])


def _is_cast(weight: nnx.Variable) -> bool:
    """Whether a weight is used in the compute format. Vectors (norms) are few, and used in the format they are kept in,
    as are wide matrices (routers) and weights that are no plain numbers."""
    own_axes = [name for name in weight.get_metadata("axes") if name != "layers"]
    return isinstance(weight, nnx.Param) and len(own_axes) > 1 and not weight.get_metadata("is_wide", False)


def _told(sides: list[Any]) -> dict[str, Any]:
    """By the layer's key among the weights, of the layers that tell anything."""
    return {str(index): side for index, side in enumerate(sides) if side}


def _seen(cache: Cache | None, index: jax.Array | int) -> Any:
    return None if cache is None else cache.at(index)


def _merged(cache: Cache | None, view: Any) -> Cache | None:
    return None if cache is None else cache.merged(view)


def _runner(graphdef: Any, call: Callable[..., BlockOutput] = Block.__call__) -> Callable[..., BlockOutput]:
    """A block as a function of its weights."""

    def run(weights: Any, *inputs: Any) -> BlockOutput:
        return call(nnx.merge(graphdef, weights), *inputs)

    return run


def _numbered(blocks: Sequence[Block]) -> nnx.Dict:
    """Blocks under the keys "0", "1", ...: a tree of weights with text for keys is the same in every file format."""
    return nnx.Dict({str(index): block for index, block in enumerate(blocks)})


def _in_order(blocks: nnx.Dict) -> list[Any]:
    return [blocks[str(index)] for index in range(len(blocks))]
