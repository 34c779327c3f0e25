"""LM head and cross-entropy as one operation that materialises the logits of only `chunk` positions at a time.

`linear_cross_entropy` is the entry point; BACKENDS is its capability table, fastest first (kernels/dispatch.py). The
head is an arbitrary function, so it may soft-cap its logits: backends take logits and return their gradient.
"""

import dataclasses
from collections.abc import Callable

import jax

from maxhydra.kernels.dispatch import CallSpec, Capability, Operation, UnsupportedError
from maxhydra.kernels.linear_cross_entropy import over_mesh, reference, triton, xla
from maxhydra.kernels.linear_cross_entropy.chunks import ChunkedLoss, PerToken, loss_sums
from maxhydra.kernels.linear_cross_entropy.over_mesh import (
    LinearHead,
    MeshAxes,
    ShardedLoss,
    SplitVocabulary,
    local_chunk,
)
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.tiles import Sizes, with_sizes

__all__ = [
    "BACKENDS",
    "OPERATION",
    "Backend",
    "Call",
    "LinearHead",
    "UnsupportedError",
    "linear_cross_entropy",
    "token_nll_over_mesh",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Logits of this dtype."""

    vocabulary: int
    """On each device."""
    is_chunked: bool
    """Whether the logits of only a chunk of each sequence may exist at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend."""

    run: PerToken | None
    """None: autodiff of the loss over all logits."""
    split_vocabulary: SplitVocabulary | None = None
    """The kernels for a part of the vocabulary."""
    multiple: int = 1
    """The vocabulary size on each device must be a multiple of this."""

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                call.vocabulary % self.multiple == 0,
                f"takes a vocabulary in multiples of {self.multiple}, not {call.vocabulary}",
            ),
            (self.run is not None or not call.is_chunked, "computes all logits at once and does not support chunks"),
        )


XLA_HALVES = SplitVocabulary(xla.statistics, xla.gradient)
# Fastest first.
BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.per_token,
        platforms=("gpu",),
        splits=("batch", "length", "vocab"),
        split_vocabulary=SplitVocabulary(triton.statistics, triton.gradient),
        multiple=triton.MULTIPLE,
        tile_extents=lambda call: triton.tile_extents(call.vocabulary),
    ),
    "xla": Backend(run=xla.per_token, splits=("batch", "length", "vocab"), split_vocabulary=XLA_HALVES),
    "reference": Backend(run=None),
}
OPERATION: Operation[Call, Backend] = Operation("linear_cross_entropy", BACKENDS)


def linear_cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array] | LinearHead,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float,
    chunk: int,
    backend: str,
    sizes: Sizes = (),
    place: Placement | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the sums over tokens [B, S] of weight * (nll + z_loss * logsumexp(z)^2) and of weight * nll.

    nll = logsumexp(z) - z[target]. With `chunk`, the logits of only `chunk` positions of each sequence exist at a time
    (0: all). The first sum is differentiable with respect to `hidden`, `weights` and the arrays that `logits_of` closes
    over; the second is treated as a constant. sizes: requested tile sizes. place: None is one device of the platform
    that JAX runs on; over a mesh `logits_of` is a LinearHead.
    """
    batch, length = targets.shape
    size = chunk if 0 < chunk < length else length
    logits = jax.eval_shape(logits_of, hidden[:, :size])
    place = (place or Placement.here()).dividing(batch=batch, length=length, stream_length=length)
    call = Call(
        platform=place.platform,
        splits=place.splits("batch", "length", "vocab"),
        dtype=logits.dtype.name,
        vocabulary=logits.shape[-1] // place.num_shards("vocab"),
        is_chunked=size < length,
        sizes=sizes,
    )
    row = OPERATION.select(backend, call)
    per_token = row.run
    if per_token is None:
        loss, nll = reference.loss_sums(logits_of, hidden, targets, weights, z_loss=z_loss)
    elif place.free_axes:
        if not isinstance(logits_of, LinearHead):
            raise ValueError("the loss over a mesh needs a LinearHead, whose weights can be split")
        per_token, value = _split_losses(row, place, sizes)
        sharded = _sharded_loss(logits_of, (per_token, value), z_loss=z_loss, chunk=chunk, length=length, place=place)
        loss, nll = over_mesh.loss_sums(sharded, (hidden, weights, logits_of.weights), targets)
    else:
        head, closed_over = jax.closure_convert(logits_of, hidden[:, :size])
        chunked = ChunkedLoss(head, with_sizes(per_token, sizes), z_loss, size)
        loss, nll = loss_sums(chunked, (hidden, weights, closed_over), targets)
    return loss, jax.lax.stop_gradient(nll)


def token_nll_over_mesh(
    head: LinearHead, hidden: jax.Array, targets: jax.Array, *, chunk: int, place: Placement
) -> jax.Array:
    """The nll of every token, float32 [B, S], on the devices of `place`; differentiable in `hidden` and the head.

    Backends do not matter: as on one device, XLA computes the softmax, and the backward pass recomputes the logits.
    """
    batch, length = targets.shape
    place = place.dividing(batch=batch, length=length, stream_length=length)
    per_token = _split_losses(BACKENDS["xla"], place, ())
    sharded = _sharded_loss(head, per_token, z_loss=0.0, chunk=chunk, length=length, place=place)
    return over_mesh.token_nll(sharded, (hidden, head.weights), targets)


def _sharded_loss(
    head: LinearHead, per_token: tuple[PerToken, PerToken], *, z_loss: float, chunk: int, length: int, place: Placement
) -> ShardedLoss:
    """The static arguments of a loss over a mesh; `per_token`: with and without gradient."""
    local = local_chunk(chunk, length, place.num_shards("length"))
    return ShardedLoss(head.apply, head.specs, *per_token, z_loss, local, place, MeshAxes.of(place))


def _split_losses(row: Backend, place: Placement, sizes: Sizes) -> tuple[PerToken, PerToken]:
    """The backend's loss of each token on a device, with and without gradient; the vocabulary may be split."""
    assert row.run is not None and row.split_vocabulary is not None
    axes = MeshAxes.of(place).vocab
    if not axes:
        return with_sizes(row.run, sizes), xla.per_token
    kernels = row.split_vocabulary
    halves = SplitVocabulary(with_sizes(kernels.statistics, sizes), with_sizes(kernels.gradient, sizes))
    return halves.per_token(axes), XLA_HALVES.per_token(axes)
