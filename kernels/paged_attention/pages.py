"""Keys and values of many sequences in pages. Letters as in the package."""

from typing import NamedTuple

import jax


class Pages(NamedTuple):
    """A cache, and which of it belongs to each row."""

    key_PKZH: jax.Array
    value_PKZH: jax.Array
    table_BW: jax.Array
    """Pages of each row, in the order of its tokens; the rest is any page."""
    length_B: jax.Array
    """Tokens of each row with its new one, which is not in the cache yet; 0 for a row that has none."""
