"""The way into the model as data: what becomes of a token before the first layer."""

from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.schema.feed_forward import Activation


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


@schema
class PerLayer(Schema):
    """A second, narrow embedding of each token for every layer (Gemma 3n, 2025)."""

    dim: int | None = option(None, ge=1)
    """Its size. null: there is none."""
    activation: Activation = Activation.gelu_tanh
    """Function on the gate by which a layer takes its own in."""


@schema
class Mtp(Schema):
    """Multi-token prediction (DeepSeek-V3, 2024): layers behind the last, of its kind, look further ahead."""

    depth: int = option(0, ge=0)
    """Tokens beyond the next that are predicted, each by a layer of its own that training alone uses. 0: none."""
    loss_weight: float = option(0.3, ge=0)
    """Training adds this times the mean of their cross-entropies."""
