"""Schema of embeddings and multi-token prediction."""

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
    """Token embedding."""

    scale: EmbeddingScale = EmbeddingScale.one
    """Factor on embeddings: one, or root_dim, sqrt(emb_dim) in the compute dtype (Vaswani et al., 2017)."""
    positions: Positions = Positions.none
    """learned: add a learned vector for each of context_length positions (Radford et al., 2018)."""


@schema
class PerLayer(Schema):
    """Per-layer embeddings: an additional small embedding of each token for every layer (Gemma 3n, 2025)."""

    dim: int | None = option(None, ge=1)
    """Dimension. null: no per-layer embeddings."""
    activation: Activation = Activation.gelu_tanh
    """Activation of the gate through which a layer uses its embedding."""


@schema
class Mtp(Schema):
    """Multi-token prediction (DeepSeek-V3, 2024): extra layers of the last kind predict later tokens."""

    depth: int = option(0, ge=0)
    """Number of extra tokens that are predicted, each by an additional layer that is used only in training. 0: none."""
    loss_weight: float = option(0.3, ge=0)
    """Weight of the mean cross-entropy of the extra predictions."""
