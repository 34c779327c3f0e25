"""Schema of feed-forward layers."""

from enum import Enum

from maxhydra.config.declare import Schema, option, schema


class Activation(Enum):
    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"


class MlpKind(Enum):
    gated = "gated"
    plain = "plain"


@schema
class Mlp(Schema):
    """Feed-forward, gated (Shazeer, 2020: SwiGLU with silu, GeGLU with gelu or gelu_tanh) or plain."""

    kind: MlpKind = MlpKind.gated
    """gated: down(activation(gate(x)) * up(x)); plain: down(activation(up(x)))."""
    dim: int | None = option(None, ge=1)
    """Hidden size of this kind. null: model.mlp_dim."""
    activation: Activation = Activation.silu
    """Activation of the gate or, if plain, of the hidden layer; gelu is exact, gelu_tanh its approximation."""
    bias: bool = False
    """Add a bias to the projections."""
