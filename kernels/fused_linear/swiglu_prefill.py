"""Gate and value of many rows, such as prompts, by one product that takes the gate along. What each makes by itself is
the largest array of a layer, and is neither written nor read: 4,096 rows of 2,048 inputs with 8,192 outputs, and back
by XLA, take 558 us on an H200, and 597 by XLA alone. For Hopper GPUs.
"""

import math

import jax

from maxhydra.kernels.fused_linear.epilogue import Activation
from maxhydra.kernels.grouped_matmul.mosaic.params import How
from maxhydra.kernels.placement import capability, processors

# Rows from which on the product takes longer than reading the weights.
LEAST_ROWS = 1024
# What rows, inputs and outputs are multiples of.
ROWS, INPUTS, OUTPUTS = 128, 64, 128
# Tiles of rows that pass over the weights together.
BAND = 16


def can_serve(M: int, N: int, K: int, dtype: str, activation: Activation) -> bool:
    """Whether the kernel takes these sizes and this gate on the devices there are."""
    fits = M >= LEAST_ROWS and M % ROWS == N % OUTPUTS == K % INPUTS == 0
    return fits and dtype == "bfloat16" and activation is jax.nn.silu and capability() == "9.0"


def gated(x_MK: jax.Array, weight_NK: jax.Array, activation: Activation) -> jax.Array:
    """[M, N / 2]: activation(x times the transpose of the first half of the weight) times that of the second half."""
    # Half a second, which no machine without such a GPU should wait for.
    from maxhydra.kernels.fused_linear.swiglu_prefill_mosaic import gated as product  # noqa: PLC0415

    band = math.gcd(BAND, x_MK.shape[0] // ROWS)
    how = How(columns=2 * OUTPUTS, stages=4, band=band, processors=processors())
    return product(how, x_MK, weight_NK, activation)
