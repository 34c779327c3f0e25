"""Feed-forward layers as data."""

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
    """Hidden size of this kind, where it differs from the model's mlp_dim."""
    activation: Activation = Activation.silu
    """Function on the gate, or on the hidden layer; gelu is the exact form, gelu_tanh its approximation."""
    bias: bool = False
    """Whether the projections add a learned vector."""
