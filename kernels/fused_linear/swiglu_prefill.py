"""Gate and up projection of many rows, such as prompts, in one matmul with a fused SwiGLU. For Hopper GPUs.

The separate gate and up outputs, the largest arrays of a layer, are neither written nor read: an MLP of 4,096 rows,
2,048 features and 8,192 hidden units, with the down projection by XLA, takes 558 us on an H200, and 597 by XLA alone.
"""

import math

import jax

from maxhydra.kernels.fused_linear.epilogue import Activation
from maxhydra.kernels.grouped_matmul.mosaic import KernelParams
from maxhydra.kernels.placement import capability, num_multiprocessors

# Number of rows from which the arithmetic takes longer than reading the weights.
LEAST_ROWS = 1024
# Rows, inputs and outputs must be multiples of these.
ROWS, INPUTS, OUTPUTS = 128, 64, 128
# Row tiles that sweep the weights together.
BAND = 16


def is_supported(M: int, N: int, K: int, dtype: str, activation: Activation) -> bool:
    """Whether the kernel supports these sizes and this activation on the current devices."""
    fits = M >= LEAST_ROWS and M % ROWS == N % OUTPUTS == K % INPUTS == 0
    return fits and dtype == "bfloat16" and activation is jax.nn.silu and capability() == "9.0"


def swiglu_matmul(x_MK: jax.Array, weight_NK: jax.Array, activation: Activation) -> jax.Array:
    """[M, N / 2]: activation(x times the transpose of the first half of the weight) times that of the second half."""
    # Importing Mosaic takes half a second, which hosts without such a GPU should not pay.
    from maxhydra.kernels.fused_linear.swiglu_prefill_mosaic import swiglu_matmul as product  # noqa: PLC0415

    band = math.gcd(BAND, x_MK.shape[0] // ROWS)
    params = KernelParams(columns=2 * OUTPUTS, stages=4, band=band, processors=num_multiprocessors())
    return product(params, x_MK, weight_NK, activation)
