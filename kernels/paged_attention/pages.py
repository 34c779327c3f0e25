"""The paged KV cache of a batch. Shape letters as in the package."""

from typing import NamedTuple

import jax


class Pages(NamedTuple):
    """Key and value pages of many sequences, and the page table of each row."""

    key_PKZH: jax.Array
    value_PKZH: jax.Array
    table_BW: jax.Array
    """Pages of each row in token order; entries beyond its length are arbitrary."""
    length_B: jax.Array
    """Tokens of each row including the new one, which is not in the cache yet; 0 for an empty row."""
