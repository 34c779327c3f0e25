"""Matmul of one row for GPUs, in Pallas for Triton: a program computes some outputs at memory bandwidth.

The fused norm is one factor per input, applied on the fly, and one factor for the whole row, applied at the end: the
weights need not wait for it. int8 codes are converted in registers.

Shapes: N outputs, K inputs, H = 2 if outputs come in pairs of gate and value, else 1.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.fused_linear.epilogue import Epilogue
from maxhydra.kernels.ptx import FMA_FLOAT32, convert_int8
from maxhydra.kernels.tiles import power_of_two_divisor

# Number of outputs from which programs of one warp are enough, number up to which multiprocessors are idle, and number
# of inputs from which a warp loads more of them at a time.
MANY, FEW, LONG = 8192, 2048, 8192
LEAST_OUTPUTS, LEAST_INPUTS = 16, 64
DTYPES = ("bfloat16", "float32")


class Tile(NamedTuple):
    """Work of a program: `rows` outputs in each of `groups` distant groups, which use the same inputs."""

    groups: int
    rows: int
    inputs: int
    """Inputs per step."""
    warps: int


def choose_tile(N: int, K: int, H: int) -> Tile:
    """The fastest tile measured on an H200 for shapes of Llama 3.2 1B, reduced to divisors of the sizes."""
    outputs, inputs = power_of_two_divisor(N), power_of_two_divisor(K)
    if N >= MANY:
        return Tile(groups=min(8 // H, outputs), rows=1, inputs=min(512, inputs), warps=1)
    if N > FEW:
        return Tile(groups=1, rows=min(4, outputs), inputs=min(2048, inputs), warps=4)
    return Tile(groups=1, rows=min(8, outputs), inputs=min(512 if K < LONG else 2048, inputs), warps=8)


def is_supported(N: int, K: int, dtype: str) -> bool:
    """Whether the kernel supports these sizes on the current devices."""
    fits = power_of_two_divisor(N) >= LEAST_OUTPUTS and power_of_two_divisor(K) >= LEAST_INPUTS and 2 * N * K < 2**31
    return jax.default_backend() == "gpu" and fits and dtype in DTYPES


def gemv_linear(
    x_1K: jax.Array,
    weight_NK: jax.Array,
    scales_N: jax.Array | None,
    epilogue: Epilogue,
    dtype: np.dtype,
    *,
    interpret: bool,
    tile: Tile | None = None,
) -> jax.Array:
    """[1, N], as `fused_linear` in the package."""
    H, K = 1 if epilogue.activation is None else 2, x_1K.shape[1]
    N = weight_NK.shape[0] // H
    tile = tile or choose_tile(N, K, H)
    G, size = tile.groups, N // tile.groups
    row_spec = pl.BlockSpec((1, K), lambda n: (0, 0))
    outputs_spec = pl.BlockSpec((G, tile.rows), lambda n: (0, n))
    weights_spec = pl.BlockSpec((H * G, tile.rows, K), lambda n: (0, n, 0))
    specs_and_arrays = [(row_spec, x_1K), (weights_spec, weight_NK.reshape(H * G, size, K))]
    if scales_N is not None:
        specs_and_arrays.append((pl.BlockSpec((H * G, tile.rows), lambda n: (0, n)), scales_N.reshape(H * G, size)))
    if epilogue.norm is not None:
        specs_and_arrays.append((row_spec, epilogue.norm.scale_K.reshape(1, K)))
    if epilogue.residual_MN is not None:
        specs_and_arrays.append((outputs_spec, epilogue.residual_MN.reshape(G, size)))
    specs, arrays = zip(*specs_and_arrays, strict=True)
    out_GN = pl.pallas_call(
        partial(_kernel, epilogue=epilogue, is_scaled=scales_N is not None, tile=tile, interpret=interpret),
        grid=(size // tile.rows,),
        in_specs=list(specs),
        out_specs=outputs_spec,
        out_shape=jax.ShapeDtypeStruct((G, size), dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="gemv",
    )(*arrays)
    return out_GN.reshape(1, N)


def _kernel(
    x_ref: Any, weight_ref: Any, *rest: Any, epilogue: Epilogue, is_scaled: bool, tile: Tile, interpret: bool
) -> None:
    """Loops over inputs are unrolled, so that many loads are in flight at once."""
    *others, out_ref = rest
    refs = iter(others)
    scales_ref = next(refs) if is_scaled else None
    norm_ref = None if epilogue.norm is None else next(refs)
    residual_ref = None if epilogue.residual_MN is None else next(refs)
    (groups, N, K), step = weight_ref.shape, tile.inputs
    spread = partial(_spread, shape=(N, step), is_shared=tile.warps < N)
    starts, squares = range(0, K, step), jnp.zeros((N, step), jnp.float32)
    inputs = [spread(x_ref, start) for start in starts]
    if epilogue.norm is not None:
        squares = sum((x_NK * x_NK for x_NK in inputs), squares)
        factors = [spread(norm_ref, start) + epilogue.norm.offset for start in starts]
        inputs = [x_NK * factor_NK for x_NK, factor_NK in zip(inputs, factors, strict=True)]
    outs = []
    for group in range(groups):
        sums = jnp.zeros((N, step), jnp.float32)
        for start, x_NK in zip(starts, inputs, strict=True):
            sums = _times_added(weight_ref[group, :, pl.ds(start, step)], x_NK, sums, interpret=interpret)
        outs.append(jnp.sum(sums, axis=1))
    if scales_ref is not None:
        outs = [out * scales_ref[group, :] for group, out in enumerate(outs)]
    if epilogue.norm is not None:
        size = jax.lax.rsqrt(jnp.sum(squares, axis=1) / K + epilogue.norm.eps)
        outs = [out * size for out in outs]
    G = out_ref.shape[0]
    if epilogue.activation is not None:
        outs = [epilogue.activation(gate) * value for gate, value in zip(outs[:G], outs[G:], strict=True)]
    for group, out in enumerate(outs):
        onto = 0.0 if residual_ref is None else residual_ref[group, :].astype(jnp.float32)
        out_ref[group, :] = (out + onto).astype(out_ref.dtype)


def _spread(row_ref: Any, start: int, shape: tuple[int, int], is_shared: bool) -> jax.Array:
    """Broadcast a slice of a row to all outputs.

    If a warp has one output of a group, every warp loads the slice itself, in the layout of the weights: anything else
    would pass through shared memory, with a barrier for all warps.
    """
    if is_shared or shape[0] == 1:
        return jnp.broadcast_to(row_ref[:, pl.ds(start, shape[1])].astype(jnp.float32), shape)
    down, across = jnp.zeros(shape, jnp.int32), jnp.broadcast_to(start + jnp.arange(shape[1])[None, :], shape)
    return plt.load(row_ref.at[down, across]).astype(jnp.float32)


def _times_added(part: jax.Array, x: jax.Array, carry: jax.Array, *, interpret: bool) -> jax.Array:
    if interpret or part.dtype != jnp.int8:
        return part.astype(jnp.float32) * x + carry
    return convert_int8(FMA_FLOAT32, jnp.float32, part, x, carry)
