"""Schema of Gated DeltaNet, a linear attention layer with a recurrent state of fixed size."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem


class DeltaBackend(Enum):
    auto = "auto"
    chunked = "chunked"
    pallas_tpu = "pallas_tpu"
    triton = "triton"
    reference = "reference"


@schema
class Delta(Schema):
    """Gated DeltaNet (Yang et al., 2024): a decaying state per head, updated by the delta rule."""

    num_key_heads: int | None = option(None, ge=1)
    """Query and key heads; divides num_value_heads. null: model.num_kv_heads."""
    num_value_heads: int | None = option(None, ge=1)
    """Value heads, each with its own state. null: model.num_heads."""
    key_dim: int | None = option(None, ge=1)
    """Dimension of a query and key head. null: model.head_dim."""
    value_dim: int | None = option(None, ge=1)
    """Dimension of a value head. null: model.head_dim."""
    taps: int = option(4, ge=1)
    """Kernel size of the short causal convolution before the heads."""

    def check(self) -> Iterator[Problem]:
        keys, values = self.num_key_heads, self.num_value_heads
        if keys is not None and values is not None and values % keys:
            divisors = [str(n) for n in range(1, values + 1) if values % n == 0]
            yield Problem(
                "num_key_heads", f"does not divide num_value_heads={values}", value=keys, accepted=", ".join(divisors)
            )
