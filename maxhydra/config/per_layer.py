"""Embeddings for each layer as data."""

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.feedforward import Activation


@schema
class PerLayer(Schema):
    """A second, narrow embedding of each token for every layer (Gemma 3n, 2025)."""

    dim: int | None = option(None, ge=1)
    """Its size. null: there is none."""
    activation: Activation = Activation.gelu_tanh
    """Function on the gate by which a layer takes its own in."""
