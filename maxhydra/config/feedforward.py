"""Feed-forward layers as data."""

from enum import Enum

from maxhydra.config.declare import Schema, option, schema


class Activation(Enum):
    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"


@schema
class Mlp(Schema):
    """Gated feed-forward (Shazeer, 2020): SwiGLU with silu, GeGLU with gelu or gelu_tanh."""

    dim: int | None = option(None, ge=1)
    """Hidden size of this kind, where it differs from the model's mlp_dim."""
    activation: Activation = Activation.silu
    """Function on the gate; gelu is the exact form, gelu_tanh its approximation."""
