"""The way into the model as data: what becomes of a token before the first layer."""

from enum import Enum

from maxhydra.config.declare import Schema, schema


class EmbeddingScale(Enum):
    one = "one"
    root_dim = "root_dim"


class Positions(Enum):
    none = "none"
    learned = "learned"


@schema
class Embedding(Schema):
    """A row of a table for each token, and what is done to it."""

    scale: EmbeddingScale = EmbeddingScale.one
    """Factor on the rows: one, or root_dim, the square root of emb_dim in the compute format (Vaswani et al., 2017)."""
    positions: Positions = Positions.none
    """learned: a vector for each of context_length positions is added to the token's (Radford et al., 2018)."""
