"""The weights of the products behind attention."""

from typing import NamedTuple

import jax


class Weights(NamedTuple):
    """Outputs first."""

    out_DA: jax.Array
    gate_up_2FD: jax.Array
    down_DF: jax.Array
    heads_QD: jax.Array | None = None
    """Of the next layer's query, key and value."""
