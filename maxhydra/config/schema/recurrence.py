"""Schema of mixers that keep a state of fixed size per sequence, other than Gated DeltaNet."""

from collections.abc import Iterator

from maxhydra.config.declare import MAX_HEADS, MAX_WIDTH, Schema, option, schema
from maxhydra.config.errors import Problem


@schema
class Convolution(Schema):
    """Gated short convolution: out(output_gate(x) * convolution(input_gate(x) * value(x))) over a few tokens, with as
    many channels as the residual stream."""

    taps: int = option(3, ge=2, le=MAX_WIDTH)
    """Kernel size of the causal convolution: a token reads itself and the taps - 1 tokens before it."""
    bias: bool = False
    """Add a bias to the projections and to the convolution."""


@schema
class Ssm(Schema):
    """State space mixer with a scalar decay per head: Mamba-2 (Dao and Gu, 2024)."""

    num_heads: int | None = option(None, ge=1, le=MAX_HEADS)
    """Heads, each with its own state. null: model.num_heads."""
    head_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Dimension of a head. null: model.head_dim."""
    num_groups: int = option(1, ge=1, le=MAX_HEADS)
    """Groups of heads, each with one query (C) and one key (B) that its heads share; divides num_heads. The norm before
    the output projection is over the heads of a group."""
    state_dim: int = option(128, ge=1, le=MAX_WIDTH)
    """Dimension of queries and keys: a state has state_dim * head_dim numbers per head."""
    taps: int = option(4, ge=2, le=MAX_WIDTH)
    """Kernel size of the short causal convolution before the recurrence."""
    filter_bias: bool = True
    """Add a bias to the convolution."""
    bias: bool = False
    """Add a bias to the projections."""
    min_step: float = option(0.0, ge=0)
    """Lower bound of the step, softplus(step(x) + bias), which scales the input and the decay of a token."""

    def check(self) -> Iterator[Problem]:
        if self.num_heads is not None and self.num_heads % self.num_groups:
            divisors = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            reason = f"does not divide num_heads={self.num_heads}"
            yield Problem("num_groups", reason, value=self.num_groups, accepted=divisors)
