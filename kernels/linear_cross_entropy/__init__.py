"""The head and the cross-entropy of its logits as one operation, which holds no more logits than asked for.

`linear_cross_entropy` is the one way in. BACKENDS says what serves what, fastest first: `auto` takes the first that
serves the call, and a backend that was asked for by name and cannot is an error. The head may do what it likes after
its product, as cap its logits: backends see logits, and hand back their gradient.
"""

import dataclasses
from collections.abc import Callable

import jax

from maxhydra.kernels.capability import CallSpec, Capability
from maxhydra.kernels.dispatch import UnsupportedError, chosen
from maxhydra.kernels.linear_cross_entropy import reference, triton, xla
from maxhydra.kernels.linear_cross_entropy.chunks import Objective, PerToken, sums
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.tiles import Sizes, sized

__all__ = ["BACKENDS", "Backend", "Call", "UnsupportedError", "choose", "linear_cross_entropy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Logits of this number format."""

    vocabulary: int
    is_cut: bool
    """Whether the logits of only a part of each sequence may exist at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """One row of the capability table."""

    run: PerToken | None
    """None: autodiff of the loss over all logits."""
    multiple: int = 1
    """Of the vocabulary."""

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                call.vocabulary % self.multiple == 0,
                f"takes a vocabulary in multiples of {self.multiple}, not {call.vocabulary}",
            ),
            (self.run is not None or not call.is_cut, "makes all logits at once, and a part was asked for"),
        )


# Fastest first.
BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.per_token,
        platforms=("gpu",),
        devices=1,
        multiple=triton.MULTIPLE,
        cut=lambda call: triton.cut(call.vocabulary),
    ),
    "xla": Backend(run=xla.per_token),
    "reference": Backend(run=None),
}


def choose(backend: str, call: Call) -> str:
    """The backend that serves the call: the one asked for, or under `auto` the fastest that can."""
    return chosen("linear_cross_entropy", backend, {name: row.refusals(call) for name, row in BACKENDS.items()})


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
    """Sums over the tokens [B, S] of weight * (nll + z_loss * logsumexp(z)^2), and of weight * nll, where
    nll = logsumexp(z) - z[target].

    With `chunk`, the logits of only so many positions of each sequence exist at a time (0: all). The first sum is to be
    differentiated, by `hidden`, `weights` and what `logits_of` closes over; the second is a constant to that. sizes:
    asked of the kernel's tile. place: None is one device of the platform that JAX runs on.
    """
    length = targets.shape[1]
    size = chunk if 0 < chunk < length else length
    logits = jax.eval_shape(logits_of, hidden[:, :size])
    place = place or Placement.here()
    call = Call(
        platform=place.platform,
        devices=place.devices,
        dtype=logits.dtype.name,
        vocabulary=logits.shape[-1],
        is_cut=size < length,
        sizes=sizes,
    )
    per_token = BACKENDS[choose(backend, call)].run
    if per_token is None:
        loss, nll = reference.sums(logits_of, hidden, targets, weights, z_loss=z_loss)
    else:
        head, held = jax.closure_convert(logits_of, hidden[:, :size])
        objective = Objective(head, sized(per_token, sizes), z_loss, size)
        loss, nll = sums(objective, (hidden, weights, held), targets)
    return loss, jax.lax.stop_gradient(nll)
