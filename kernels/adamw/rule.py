"""What an update works on, and by which numbers."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Held(NamedTuple):
    """A weight and its moments, of one shape."""

    weight: jax.Array
    mu: jax.Array
    nu: jax.Array


class Now(NamedTuple):
    """Numbers of one step, each float32."""

    scale: jax.Array
    """Of the gradients."""
    rate: jax.Array
    mu_scale: jax.Array
    """1 / (1 - b1^t) of the t-th update: moments begin at zero."""
    nu_scale: jax.Array
    apply: jax.Array
    """0: all stays as it is."""

    def vector(self) -> jax.Array:
        return jnp.stack([number.astype(jnp.float32) for number in self])


@dataclasses.dataclass(frozen=True)
class Rule:
    """Numbers of all steps."""

    b1: float
    b2: float
    eps: float
    decay: float
