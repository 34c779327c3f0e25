"""The loss over a mesh: every device computes the logits of its tokens for its part of the vocabulary.

The parts of the softmax are combined by two small all-reduces, of a maximum and of two sums per token; logits never
leave their device. The head is gathered once before the chunks, and its gradient is summed over the chunks before it is
reduced, so traffic does not depend on the number of chunks.

The nll of every token, for losses that are any function of it, works alike: its gradient is that of the sum of the nll
weighted by the cotangents. The backward pass gathers the head again and recomputes the logits.

B batch, S positions, D features, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxhydra.kernels.linear_cross_entropy import chunks
from maxhydra.kernels.linear_cross_entropy.chunks import ChunkedLoss, PerToken
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.sharded_vjp import axes_of

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class LinearHead:
    """An LM head that can be applied to shards: a function, its weights, and how they are stored over the mesh."""

    apply: Callable[[Tree, jax.Array], jax.Array]
    """(weights, hidden [..., D]) -> logits [..., V], for any part of the vocabulary."""
    weights: Tree
    """Over a mesh in the dtype of the matmul, so that it is also the dtype on the wire."""
    specs: Tree
    """PartitionSpec of every weight."""

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.apply(self.weights, hidden)


class Gradient(Protocol):
    """(logits [..., V], targets, weights, logsumexp of all logits) -> the gradient of sum(weights * loss)."""

    def __call__(
        self,
        logits: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        normaliser: jax.Array,
        *,
        z_loss: float,
        dtype: np.dtype,
    ) -> jax.Array: ...


class SplitVocabulary(NamedTuple):
    """`PerToken` in two halves, between which the parts of a vocabulary are combined."""

    statistics: Callable[..., tuple[jax.Array, jax.Array]]
    """(logits [..., V], targets) -> logsumexp, and the target's logit or 0 if it is not in this part."""
    gradient: Gradient

    def per_token(self, axes: tuple[str, ...]) -> PerToken:
        """The loss of tokens whose vocabulary is split over these mesh axes, inside a shard_map."""
        return partial(_per_token, self, axes)


def _per_token(
    halves: SplitVocabulary,
    axes: tuple[str, ...],
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float,
    dtype: np.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    local_targets = targets - jax.lax.axis_index(axes) * logits.shape[-1]
    part, target_logit = halves.statistics(logits, local_targets)
    largest = jax.lax.pmax(part, axes)
    total, target_logit = jax.lax.psum((jnp.exp(part - largest), target_logit), axes)
    normaliser = largest + jnp.log(total)
    nll = normaliser - target_logit
    d_logits = halves.gradient(logits, local_targets, weights, normaliser, z_loss=z_loss, dtype=dtype)
    return nll + z_loss * jnp.square(normaliser), nll, d_logits


class MeshAxes(NamedTuple):
    """How tokens, vocabulary and hidden states are split; read outside the shard_map, where its axes are free."""

    tokens: tuple[str, ...]
    vocab: tuple[str, ...]
    stream: tuple[str, ...]
    """Axes that split the length of hidden states but not of targets: those of the vocabulary, or none."""
    token_spec: PartitionSpec
    hidden_spec: PartitionSpec

    @classmethod
    def of(cls, place: Placement) -> "MeshAxes":
        tokens = place.spec("batch", "length")
        vocab, length, stream = (axes_of(place.spec(name)[0]) for name in ("vocab", "length", "stream_length"))
        is_stream_split = bool(vocab) and stream == (*length, *vocab)
        return cls(
            tokens=tuple(axis for entry in tokens for axis in axes_of(entry)),
            vocab=vocab,
            stream=vocab if is_stream_split else (),
            token_spec=tokens,
            hidden_spec=place.spec("batch", "stream_length") if is_stream_split else tokens,
        )

    def stored(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec of a stored weight of the head, and of its gradient, over the axes of tokens and vocabulary."""
        return _restrict(spec, (*self.tokens, *self.vocab))


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedLoss:
    """The static arguments of a call over a mesh."""

    apply: Callable[[Tree, jax.Array], jax.Array]
    specs: Tree
    per_token: PerToken
    value: PerToken
    """As `per_token`, where only the values are used."""
    z_loss: float
    chunk: int
    """Positions of a chunk on each device."""
    place: Placement
    axes: MeshAxes


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_sums(sharded: ShardedLoss, inputs: Tree, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum the weighted loss and nll over all tokens; `inputs`: hidden, weights and the weights of the head."""

    def on_device(inputs: Tree, targets: jax.Array) -> Tree:
        hidden, weights, head = inputs
        head = _gather_head(sharded, head)
        chunked = _chunked(sharded, head, sharded.value)
        sums = chunks.loss_sums(chunked, (_gather(sharded, hidden), weights, _floats(head)), targets)
        return jax.lax.psum(sums, sharded.axes.tokens)

    in_specs = _input_specs(sharded)
    return sharded.place.manual(on_device, in_specs, (PartitionSpec(), PartitionSpec()))(inputs, targets)


def _forward(sharded: ShardedLoss, inputs: Tree, targets: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Tree]:
    """The sums, and the gradient of the loss with respect to the inputs."""
    tokens = sharded.axes.token_spec
    floats = [spec for spec, weight in zip(*_leaves(sharded.specs, inputs[2]), strict=True) if _is_float(weight)]

    def on_device(inputs: Tree, targets: jax.Array) -> Tree:
        hidden, weights, head = inputs
        head = _gather_head(sharded, head)
        chunked = _chunked(sharded, head, sharded.per_token)
        arguments = (_gather(sharded, hidden), weights, _floats(head))
        sums, (d_hidden, d_weights, d_head) = chunks.sums_and_gradient(chunked, arguments, targets)
        d_head = [_reduce(sharded, spec, d, like) for spec, d, like in zip(floats, d_head, _floats(head), strict=True)]
        return jax.lax.psum(sums, sharded.axes.tokens), (_scatter(sharded, d_hidden), d_weights, d_head)

    gradient = (sharded.axes.hidden_spec, tokens, [sharded.axes.stored(spec) for spec in floats])
    run = sharded.place.manual(on_device, _input_specs(sharded), ((PartitionSpec(), PartitionSpec()), gradient))
    sums, (d_hidden, d_weights, d_head) = run(inputs, targets)
    return sums, (d_hidden, d_weights, d_head, inputs[2])


def _backward(sharded: ShardedLoss, residuals: Tree, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
    *gradient, head = residuals
    d_hidden, d_weights, d_head = jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, gradient)
    leaves, tree = jax.tree.flatten(head)
    remaining = iter(d_head)
    d_leaves = [next(remaining) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves]
    return (d_hidden, d_weights, jax.tree.unflatten(tree, d_leaves)), None


loss_sums.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_nll(sharded: ShardedLoss, inputs: Tree, targets: jax.Array) -> jax.Array:
    """The nll of every token [B, S]; `inputs`: hidden and the weights of the head."""

    def on_device(inputs: Tree, targets: jax.Array) -> jax.Array:
        hidden, head = inputs[0], _gather_head(sharded, inputs[1])
        chunked = _chunked(sharded, head, sharded.value)
        return chunks.token_nll(chunked, (_gather(sharded, hidden), _floats(head)), targets)

    (hidden, tokens, head), _ = _input_specs(sharded)
    return sharded.place.manual(on_device, ((hidden, head), tokens), tokens)(inputs, targets)


def _nll_forward(sharded: ShardedLoss, inputs: Tree, targets: jax.Array) -> tuple[jax.Array, Tree]:
    return token_nll(sharded, inputs, targets), (inputs, targets)


def _nll_backward(sharded: ShardedLoss, residuals: Tree, cotangent: jax.Array) -> tuple[Tree, None]:
    (hidden, head), targets = residuals
    _, gradient = _forward(sharded, (hidden, cotangent, head), targets)
    one = jnp.ones((), jnp.float32)
    (d_hidden, _, d_head), _ = _backward(sharded, gradient, (one, one))
    return (d_hidden, d_head), None


token_nll.defvjp(_nll_forward, _nll_backward)


def _chunked(sharded: ShardedLoss, head: Tree, per_token: PerToken) -> ChunkedLoss:
    """The loss of one device; weights of the head that are not floats are constants."""
    leaves, tree = jax.tree.flatten(head)

    def apply(hidden: jax.Array, *floats: jax.Array) -> jax.Array:
        remaining = iter(floats)
        merged = [next(remaining) if _is_float(leaf) else leaf for leaf in leaves]
        return sharded.apply(jax.tree.unflatten(tree, merged), hidden)

    return ChunkedLoss(apply, per_token, sharded.z_loss, sharded.chunk, value=sharded.value, sum_dtype=jnp.float32)


def _input_specs(sharded: ShardedLoss) -> tuple[Any, ...]:
    tokens = sharded.axes.token_spec
    head = jax.tree.map(sharded.axes.stored, sharded.specs, is_leaf=_is_spec)
    return (sharded.axes.hidden_spec, tokens, head), tokens


def _gather_head(sharded: ShardedLoss, head: Tree) -> Tree:
    """The weights of the head for this device's part of the vocabulary.

    An explicit all-gather: the partitioner would move it before the conversion to the compute dtype.
    """

    def gather(spec: PartitionSpec, weight: jax.Array) -> jax.Array:
        for dimension, entry in enumerate(sharded.axes.stored(spec)):
            axes = tuple(axis for axis in axes_of(entry) if axis in sharded.axes.tokens)
            weight = jax.lax.all_gather(weight, axes, axis=dimension, tiled=True) if axes else weight
        return weight

    return jax.tree.map(gather, sharded.specs, head, is_leaf=_is_spec)


def _gather(sharded: ShardedLoss, hidden: jax.Array) -> jax.Array:
    """Hidden states of all positions that a device needs."""
    axes = sharded.axes.stream
    return jax.lax.all_gather(hidden, axes, axis=1, tiled=True) if axes else hidden


def _scatter(sharded: ShardedLoss, d_hidden: jax.Array) -> jax.Array:
    """The gradient of the hidden states, summed over the parts of the vocabulary."""
    if sharded.axes.stream:
        return jax.lax.psum_scatter(d_hidden, sharded.axes.stream, scatter_dimension=1, tiled=True)
    return jax.lax.psum(d_hidden, sharded.axes.vocab) if sharded.axes.vocab else d_hidden


def _reduce(sharded: ShardedLoss, spec: PartitionSpec, gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Sum the gradient of a weight over tokens, in the dtype of the weight; each device gets its stored part.

    A weight that the vocabulary does not split, as a factor of LoRA, gets the sum over the parts of the vocabulary.
    """
    gradient = gradient.astype(like.dtype)
    scattered: set[str] = set()
    stored = sharded.axes.stored(spec)
    split = {axis for entry in stored for axis in axes_of(entry)}
    for dimension, entry in enumerate(stored):
        axes = tuple(axis for axis in axes_of(entry) if axis in sharded.axes.tokens)
        if axes:
            gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True)
            scattered.update(axes)
    parts = tuple(axis for axis in sharded.axes.vocab if axis not in split)
    rest = (*(axis for axis in sharded.axes.tokens if axis not in scattered), *parts)
    return jax.lax.psum(gradient, rest) if rest else gradient


def local_chunk(chunk: int, length: int, shards: int) -> int:
    """Positions of a chunk on each of the devices over which a sequence is split; `length`: of the sequence."""
    if not 0 < chunk < length:
        return length // shards
    return chunk // shards if chunk % shards == 0 else math.gcd(chunk, length // shards)


def _restrict(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """A spec with only these mesh axes."""
    entries = (tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec)
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in entries))


def _leaves(specs: Tree, head: Tree) -> tuple[list[PartitionSpec], list[jax.Array]]:
    return jax.tree.leaves(specs, is_leaf=_is_spec), jax.tree.leaves(head)


def _floats(head: Tree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(head) if _is_float(leaf)]


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
