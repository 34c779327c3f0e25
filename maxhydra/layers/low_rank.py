"""LoRA updates of weights that are not linear projections: the matrices of experts, the embedding and the head.

The layers that own these weights multiply by the two factors in their own way: experts in grouped matmuls, the
embedding by a lookup in its first factor.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.layers.linear import LoraSpec


class Factors(NamedTuple):
    """The factors of an update a @ b; the scale is part of b."""

    a: jax.Array
    """[..., inputs, rank]."""
    b: jax.Array
    """[..., rank, outputs]."""

    def padded(self, multiple: int) -> "Factors":
        """The same update, with zeros that round the rank up to a multiple."""
        missing = -self.a.shape[-1] % multiple
        leading = [(0, 0)] * (self.a.ndim - 2)
        return Factors(
            jnp.pad(self.a, (*leading, (0, 0), (0, missing))), jnp.pad(self.b, (*leading, (0, missing), (0, 0)))
        )


class LowRank(nnx.Module):
    """scale * a @ b (Hu et al., 2021), without dropout. PiSSA subtracts the update at the start of training."""

    def __init__(self, a: nnx.Param, b: nnx.Param, spec: LoraSpec, *, start: tuple[nnx.Param, nnx.Param] | None = None):
        """`start`: a and b at the start of training (PiSSA), which are constant."""
        self.a, self.b, self.spec = a, b, spec
        self.start_a: nnx.Param | None = None if start is None else start[0]
        self.start_b: nnx.Param | None = None if start is None else start[1]

    def factors(self, dtype: np.dtype) -> Factors:
        """Both factors in a dtype; with PiSSA of twice the rank."""
        a, b = self.a[...], self.b[...]
        if self.start_a is not None and self.start_b is not None:
            a = jnp.concatenate([a, jax.lax.stop_gradient(self.start_a[...])], axis=-1)
            b = jnp.concatenate([b, -jax.lax.stop_gradient(self.start_b[...])], axis=-2)
        return Factors(a.astype(dtype), (self.spec.scale * b).astype(dtype))


def factors_of(lora: LowRank | None, dtype: np.dtype, *, is_adapted: bool) -> Factors | None:
    """The factors of an active update; None without one."""
    return lora.factors(dtype) if lora is not None and is_adapted else None
