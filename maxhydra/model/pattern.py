"""The repeated pattern of layers as one scan over its repetitions; layers as pure functions.

B batch, T tokens, D residual stream.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxhydra.layers import Cache, Context


class Repetitions(NamedTuple):
    """Inputs of consecutive repetitions, stacked over them."""

    number: jax.Array
    """Index of each repetition."""
    weights: list[Any]
    """Weights by position in the pattern."""
    layer_inputs: Any
    """`Context.layer_inputs` as [repetitions, positions, B, T, ...]."""


class PatternOutput(NamedTuple):
    """What consecutive repetitions return."""

    x_BTD: jax.Array
    caches: list[Any]
    layer_outputs: list[jax.Array]
    """By position, the residual stream after the layer, stacked over repetitions; empty if it is not kept."""
    aux: list[Any]
    """By position, the aux outputs stacked over repetitions."""


class StackOutput(NamedTuple):
    """Output of consecutive layers."""

    x_BTD: jax.Array
    caches: list[Any]
    layer_outputs: list[jax.Array]
    aux: dict[str, Any]
    ctx: Context
    """The context, with what these layers share with later ones."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The layers of one repetition as pure functions of their weights."""

    runs: list[Callable[..., Any]]
    """By position, a function of weights, residual stream and context, rematerialized by the config's policy."""
    names: list[str]
    """By position, the kind of the layer."""
    first: int
    """Index of the first layer of the pattern in the model."""
    keep_layers: bool
    unroll: int

    def scan(self, x_BTD: jax.Array, ctx: Context, caches: list[Any], repetitions: Repetitions) -> PatternOutput:
        """Run repetitions in sequence. Caches are carried and updated in place; scanned over, they would be held twice.

        Pattern layers share keys and values with no later layers, and the selection of an indexer with those of the
        same repetition: prefix layers share both with all.
        """
        ctx = dataclasses.replace(ctx, output_index=None)

        def run(carry: tuple[jax.Array, list[Any]], repetition: Repetitions) -> tuple[Any, Any]:
            return self._run_repetition(*carry, ctx, repetition)

        unroll = min(self.unroll, len(repetitions.number))
        (x_BTD, caches), (layer_outputs, aux) = jax.lax.scan(run, (x_BTD, caches), repetitions, unroll=unroll)
        return PatternOutput(x_BTD, caches, layer_outputs, aux)

    def _run_repetition(self, x_BTD: jax.Array, caches: list[Any], ctx: Context, at: Repetitions) -> tuple[Any, Any]:
        new_caches, layer_outputs, aux = [], [], []
        for position, (run, cache) in enumerate(zip(self.runs, caches, strict=True)):
            layer = self.first + at.number * len(self.runs) + position
            inputs = [None if x is None else x[position] for x in at.layer_inputs]
            layer_ctx = ctx.at_layer(layer, cache_view(cache, at.number), *inputs)
            out = run(at.weights[position], x_BTD, layer_ctx)
            if out.shared is not None:
                ctx = dataclasses.replace(ctx, shared={**ctx.shared, self.names[position]: out.shared})
            x_BTD = out.x_BTD
            new_caches.append(merge_view(cache, out.cache))
            layer_outputs.append(x_BTD)
            aux.append(out.aux)
        return (x_BTD, new_caches), (layer_outputs if self.keep_layers else [], aux)


def cache_view(cache: Cache | None, index: jax.Array | int) -> Any:
    """The cache of one layer; None without a cache."""
    return None if cache is None else cache.at(index)


def merge_view(cache: Cache | None, view: Any) -> Cache | None:
    """The cache with one layer's part updated; None without a cache."""
    return None if cache is None else cache.with_layer(view)


def by_layer(aux: list[Any]) -> dict[str, Any]:
    """Aux outputs under the layer's key in the parameter tree; only layers that have any."""
    return {str(index): outputs for index, outputs in enumerate(aux) if outputs}


def as_function(graphdef: Any, method: Callable[..., Any] = operator.call) -> Callable[..., Any]:
    """A block as a pure function of its weights and inputs."""

    def run(weights: Any, *inputs: Any) -> Any:
        return method(nnx.merge(graphdef, weights), *inputs)

    return run


@functools.lru_cache(maxsize=256)
def as_traced_once(graphdef: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """A block as a jitted function, of which jax caches the trace: an engine unrolls all layers for every bucket."""
    return jax.jit(as_function(graphdef, method))
