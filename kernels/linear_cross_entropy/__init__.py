"""The head and the cross-entropy of its logits as one operation, which holds no more logits than asked for.

`linear_cross_entropy` is the one way in. BACKENDS says what serves what, fastest first: `auto` takes the first that
serves the call, and a backend that was asked for by name and cannot is an error. The head may do what it likes after
its product, as cap its logits: backends see logits, and hand back their gradient.
"""

import dataclasses
from collections.abc import Callable

import jax

from maxhydra.kernels.choice import UnsupportedError, chosen
from maxhydra.kernels.linear_cross_entropy import reference, triton, xla
from maxhydra.kernels.linear_cross_entropy.chunks import Objective, PerToken, sums
from maxhydra.kernels.place import Place

__all__ = ["BACKENDS", "Backend", "Call", "UnsupportedError", "choose", "linear_cross_entropy"]


@dataclasses.dataclass(frozen=True)
class Call:
    """What a backend must cope with, known before anything runs."""

    platform: str
    devices: int
    dtype: str
    """Of the logits."""
    vocabulary: int
    is_cut: bool
    """Whether the logits of only a part of each sequence may exist at a time."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """One row of the capability table."""

    run: PerToken | None
    """None: autodiff of the loss over all logits."""
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    devices: int | None = None
    """As many as it can be spread over; None: any number."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    multiple: int = 1
    """Of the vocabulary."""

    def refusals(self, call: Call) -> tuple[str, ...]:
        """Why this backend cannot serve the call; empty if it can."""
        needs = (
            (call.platform in self.platforms, f"runs on {' or '.join(self.platforms)}, not {call.platform}"),
            (self.devices in (None, call.devices), f"runs on {self.devices} device, not {call.devices}"),
            (call.dtype in self.dtypes, f"takes {' or '.join(self.dtypes)}, not {call.dtype}"),
            (
                call.vocabulary % self.multiple == 0,
                f"takes a vocabulary in multiples of {self.multiple}, not {call.vocabulary}",
            ),
            (self.run is not None or not call.is_cut, "makes all logits at once, and a part was asked for"),
        )
        return tuple(reason for is_met, reason in needs if not is_met)


# Fastest first.
BACKENDS: dict[str, Backend] = {
    "triton": Backend(run=triton.per_token, platforms=("gpu",), devices=1, multiple=triton.MULTIPLE),
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
    place: Place | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums over the tokens [B, S] of weight * (nll + z_loss * logsumexp(z)^2), and of weight * nll, where
    nll = logsumexp(z) - z[target].

    With `chunk`, the logits of only so many positions of each sequence exist at a time (0: all). The first sum is to be
    differentiated, by `hidden`, `weights` and what `logits_of` closes over; the second is a constant to that. place:
    None is one device of the platform that JAX runs on.
    """
    length = targets.shape[1]
    size = chunk if 0 < chunk < length else length
    logits = jax.eval_shape(logits_of, hidden[:, :size])
    place = place or Place.here()
    call = Call(place.platform, place.devices, logits.dtype.name, vocabulary=logits.shape[-1], is_cut=size < length)
    per_token = BACKENDS[choose(backend, call)].run
    if per_token is None:
        loss, nll = reference.sums(logits_of, hidden, targets, weights, z_loss=z_loss)
    else:
        head, held = jax.closure_convert(logits_of, hidden[:, :size])
        loss, nll = sums(Objective(head, per_token, z_loss, size), (hidden, weights, held), targets)
    return loss, jax.lax.stop_gradient(nll)
