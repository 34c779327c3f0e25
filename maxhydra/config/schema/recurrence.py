"""Schema of mixers that keep a state of fixed size per sequence, other than Gated DeltaNet."""

from maxhydra.config.declare import MAX_WIDTH, Schema, option, schema


@schema
class Convolution(Schema):
    """Gated short convolution: out(output_gate(x) * convolution(input_gate(x) * value(x))) over a few tokens, with as
    many channels as the residual stream."""

    taps: int = option(3, ge=2, le=MAX_WIDTH)
    """Kernel size of the causal convolution: a token reads itself and the taps - 1 tokens before it."""
    bias: bool = False
    """Add a bias to the projections and to the convolution."""
