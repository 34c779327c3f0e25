"""A model as plain functions over a plain tree of weights: the only door through which the rest of the code sees it."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from maxhydra.config import ConfigError, Problem
from maxhydra.config.regex import matches
from maxhydra.config.schema import model as config
from maxhydra.config.schema.adapter import Adapter
from maxhydra.config.schema.quantization import TO_KEEP, Quantization, QuantizationKind, QuantizationRule
from maxhydra.layers import CacheSpec, Context, LoraSpec, formats_of
from maxhydra.model.decoder import BLOCKS, Decoder, DecoderSpec, ModelOutput
from maxhydra.sharding import Sharder

Tree = Any


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """What a model is, without its weights. Nothing here allocates until `init` or `empty_cache` is called.

    Weights are nested dicts of arrays keyed by text. The layers of one position of the pattern are stacked on a leading
    axis: `pattern/0/attention/query/kernel` is [layers, embed, heads, head_dim].
    """

    config: config.Model
    adapter: Adapter | None = None
    quantization: Quantization | None = None

    @property
    def base(self) -> "ModelDef":
        """The model without its adapter, its weights plain numbers."""
        own = None if self.is_packed or self.quantization is None else self.quantization.without_history()
        return dataclasses.replace(self, adapter=None, quantization=own)

    @property
    def is_packed(self) -> bool:
        """Whether weights are kept in fewer bits than they are used in, adapters aside."""
        return self.quantization is not None and not self.quantization.kinds.isdisjoint(TO_KEEP)

    @cached_property
    def _spec(self) -> DecoderSpec:
        return DecoderSpec.of(self.config, LoraSpec.of(self.adapter), formats_of(self.quantization))

    @property
    def is_written_out(self) -> bool:
        """Whether the layers of the pattern run one after the other in the program, and not in a loop."""
        return self._spec.is_written_out

    @cached_property
    def _abstract(self) -> Decoder:
        """The module with shapes in place of arrays."""
        decoder = nnx.eval_shape(lambda: Decoder(self._spec, jax.random.key(0)))
        names = decoder.projections()
        problems = list(_unmatched("adapter.targets", self.adapter, names))
        for path, rule in (self.quantization.rules if self.quantization else {}).items():
            key = ".".join(filter(None, ("quantization", path, "targets")))
            problems += _unmatched(key, rule, [*names, *_others(rule, decoder)])
        if problems:
            raise ConfigError(problems)
        return decoder

    @cached_property
    def _graphdef(self) -> Any:
        return nnx.graphdef(self._abstract)

    @cached_property
    def shapes(self) -> Tree:
        """Shape and dtype of every weight."""
        return nnx.to_pure_dict(nnx.state(self._abstract))

    @cached_property
    def axes(self) -> Tree:
        """Logical axis names of every weight."""
        weights = nnx.to_flat_state(nnx.state(self._abstract))
        axes = {path: weight.get_metadata("axes") for path, weight in weights}
        return nnx.traversals.unflatten_mapping(axes)

    @cached_property
    def _cast_weights(self) -> set[tuple[str, ...]]:
        return self._abstract.cast_weights()

    def init(self, key: jax.Array) -> Tree:
        """Initial weights. The same under any sharding; jit with out_shardings to make each shard where it belongs."""
        return nnx.to_pure_dict(nnx.state(Decoder(self._spec, key)))

    def forward(
        self, params: Tree, tokens: jax.Array, ctx: Context, *, keep: bool = False, ahead: bool = False
    ) -> ModelOutput:
        """All that a pass over tokens [B, T] gives, with the stream after every layer where that is to be kept, and
        with what predicts tokens beyond the next where that is to be looked at."""
        return self._bind(params)(tokens, ctx, keep=keep, ahead=ahead)

    def hidden(self, params: Tree, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
        """Hidden states [B, T, D] of tokens [B, T] after the final norm, and the cache with these tokens in it; of the
        asked tokens alone where ctx asks for one of each row."""
        forward = self.forward(params, tokens, ctx)
        return forward.hidden_BTD, forward.cache

    def features(
        self, params: Tree, tokens: jax.Array, ctx: Context, layers: Sequence[int]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Hidden states as `hidden` gives them, and the residual stream [B, T, D] after each of some layers."""
        forward = self.forward(params, tokens, ctx, keep=bool(layers))
        return forward.hidden_BTD, [forward.kept[layer] for layer in layers]

    def logits(self, params: Tree, hidden: jax.Array, sharder: Sharder) -> jax.Array:
        """Logits [B, T, V] of hidden states, in dtypes.logits, soft-capped."""
        return self._bind(params).logits(hidden, sharder)

    def largest_logit(self, params: Tree, hidden_BD: jax.Array, sharder: Sharder) -> tuple[jax.Array, jax.Array]:
        """The largest of each row's logits [B] and whose it is, the first where several are; not finite where any is no
        number. Logits themselves need not be written for that."""
        return self._bind(params).largest_logit(hidden_BD, sharder)

    def cast(self, weights: Tree) -> Tree:
        """Weights, or a part of them, with the layers' matrices in the compute format, which layers would cast by
        themselves: who differentiates by these has gradients as the products make them, in half the bytes."""
        compute, paths = self._spec.dtypes.compute, self._cast_weights
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: leaf.astype(compute) if tuple(key.key for key in keys) in paths else leaf, weights
        )

    def settled(self, new: Tree, old: Tree, told: Tree) -> Tree:
        """The weights that a training step made of old ones, with what layers change in themselves by what they told.

        `told`: as `ModelOutput.sides`, perhaps summed. Weights that are not trained, as those under an adapter, stay.
        """
        for group in BLOCKS:
            specs, sides = getattr(self._spec, group), told.get(group, {})
            blocks = {
                index: specs[int(index)].apply_aux_updates(block, old[group][index], sides.get(index, {}))
                for index, block in new.get(group, {}).items()
            }
            new = {**new, group: blocks} if blocks else new
        return new

    def empty_cache(self, room: CacheSpec) -> Tree:
        """The cache of every layer, each of the kind that its mixer needs."""
        return self._abstract.empty_cache(room)

    def _bind(self, params: Tree) -> Decoder:
        """The module over its own weights; what lies beside them, such as a teacher's, is not its business."""
        return nnx.merge(self._graphdef, {name: params[name] for name in self.shapes})


def build(model: config.Model, adapter: Adapter | None = None, quantization: Quantization | None = None) -> ModelDef:
    """The model of a config, with what an adapter adds to it, and the number formats of its products."""
    return ModelDef(model, adapter, quantization)


def _others(rule: QuantizationRule, decoder: Decoder) -> list[str]:
    """Weights besides projections that a rule may be for: the products of experts and of the two ends of the model are
    made in model.dtypes.compute, so that they have to do with formats of weights alone."""
    is_int8 = rule.kind in (QuantizationKind.int8_weights, QuantizationKind.qat_int8)
    is_int4 = rule.kind in (QuantizationKind.int4_weights, QuantizationKind.qat_int4)
    ends = ["embedding", *(["head"] if decoder.head else [])] if is_int8 else []
    return [*ends, *(decoder.expert_maps() if is_int8 or is_int4 else [])]


def _unmatched(key: str, section: Adapter | QuantizationRule | None, names: list[str]) -> Iterator[Problem]:
    """Every target must name a projection: a typo would do less than was asked for, in silence."""
    targets = (section.targets if section else None) or []
    for target in targets:
        if not any(matches([target], name) for name in names):
            accepted = f"regular expressions on {', '.join(dict.fromkeys(names))}"
            yield Problem(key, f"no projection's name matches {target!r}", value=targets, accepted=accepted)
