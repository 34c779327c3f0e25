"""LM head and cross-entropy as one operation that materialises the logits of only `chunk` positions at a time.

`linear_cross_entropy` is the entry point; BACKENDS is its capability table, fastest first (kernels/dispatch.py). The
head is an arbitrary function, so it may soft-cap its logits: backends take logits and return their gradient.
"""

import dataclasses
from collections.abc import Callable

import jax

from maxhydra.kernels.dispatch import CallSpec, Capability, Operation, UnsupportedError
from maxhydra.kernels.linear_cross_entropy import reference, triton, xla
from maxhydra.kernels.linear_cross_entropy.chunks import ChunkedLoss, PerToken, loss_sums
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.tiles import Sizes, with_sizes

__all__ = ["BACKENDS", "OPERATION", "Backend", "Call", "UnsupportedError", "linear_cross_entropy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Logits of this dtype."""

    vocabulary: int
    is_chunked: bool
    """Whether the logits of only a chunk of each sequence may exist at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend."""

    run: PerToken | None
    """None: autodiff of the loss over all logits."""
    multiple: int = 1
    """The vocabulary size must be a multiple of this."""

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                call.vocabulary % self.multiple == 0,
                f"takes a vocabulary in multiples of {self.multiple}, not {call.vocabulary}",
            ),
            (self.run is not None or not call.is_chunked, "computes all logits at once and does not support chunks"),
        )


# Fastest first.
BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.per_token,
        platforms=("gpu",),
        splits=(),
        multiple=triton.MULTIPLE,
        tile_extents=lambda call: triton.tile_extents(call.vocabulary),
    ),
    "xla": Backend(run=xla.per_token),
    "reference": Backend(run=None),
}
OPERATION: Operation[Call, Backend] = Operation("linear_cross_entropy", BACKENDS)


def linear_cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array],
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
    that JAX runs on.
    """
    length = targets.shape[1]
    size = chunk if 0 < chunk < length else length
    logits = jax.eval_shape(logits_of, hidden[:, :size])
    place = place or Placement.here()
    call = Call(
        platform=place.platform,
        splits=place.splits("batch", "length", "vocab"),
        dtype=logits.dtype.name,
        vocabulary=logits.shape[-1],
        is_chunked=size < length,
        sizes=sizes,
    )
    per_token = OPERATION.select(backend, call).run
    if per_token is None:
        loss, nll = reference.loss_sums(logits_of, hidden, targets, weights, z_loss=z_loss)
    else:
        head, closed_over = jax.closure_convert(logits_of, hidden[:, :size])
        chunked = ChunkedLoss(head, with_sizes(per_token, sizes), z_loss, size)
        loss, nll = loss_sums(chunked, (hidden, weights, closed_over), targets)
    return loss, jax.lax.stop_gradient(nll)
