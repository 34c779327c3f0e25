"""A model as plain functions over a plain tree of weights: the only door through which the rest of the code sees it."""

import dataclasses
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from maxhydra.config import model as config
from maxhydra.layers import Context, Room
from maxhydra.model.decoder import Decoder, DecoderSpec
from maxhydra.sharding import Sharder

Tree = Any


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """What a model is, without its weights. Nothing here allocates until `init` or `empty_cache` is called.

    Weights are nested dicts of arrays keyed by text. The layers of one position of the pattern are stacked on a leading
    axis: `pattern/0/attention/query` is [layers, embed, heads, head_dim].
    """

    config: config.Model

    @cached_property
    def _spec(self) -> DecoderSpec:
        return DecoderSpec.of(self.config)

    @cached_property
    def _abstract(self) -> Decoder:
        """The module with shapes in place of arrays."""
        return nnx.eval_shape(lambda: Decoder(self._spec, jax.random.key(0)))

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

    def init(self, key: jax.Array) -> Tree:
        """Initial weights. The same under any sharding; jit with out_shardings to make each shard where it belongs."""
        return nnx.to_pure_dict(nnx.state(Decoder(self._spec, key)))

    def hidden(self, params: Tree, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
        """Hidden states [B, T, D] of tokens [B, T] after the final norm, and the cache with these tokens in it."""
        return self._bind(params)(tokens, ctx)

    def logits(self, params: Tree, hidden: jax.Array, sharder: Sharder) -> jax.Array:
        """Logits [B, T, V] of hidden states, in dtypes.logits, soft-capped."""
        return self._bind(params).logits(hidden, sharder)

    def empty_cache(self, room: Room) -> Tree:
        """The cache of every layer, each of the kind that its mixer needs."""
        return self._abstract.empty_cache(room)

    def _bind(self, params: Tree) -> Decoder:
        return nnx.merge(self._graphdef, params)


def build(model: config.Model) -> ModelDef:
    """The model of a config."""
    return ModelDef(model)
