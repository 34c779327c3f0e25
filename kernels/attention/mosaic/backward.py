"""The backward kernel: a program has 128 or 64 keys and iterates over all queries that see them; two warpgroups
compute.

Everything is transposed, keys by queries, so that the weights and their gradients are left operands, which may be in
registers; the gradients of keys and values stay there too. The gradient of the queries is accumulated in global memory,
in float32, by atomic adds in the order in which programs arrive, so two runs differ by rounding.

backward_split.py and backward_shared.py define how the warpgroups share the work. If registers are short, each
warpgroup has its own code: with its index static, shared-memory addresses are constants, which would otherwise take
registers that the accumulators need.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs, Ranges, Rows
from maxhydra.kernels.attention.mosaic import KernelParams
from maxhydra.kernels.attention.mosaic.backward_program import Barriers, Memory, Program, Sizes, Worker
from maxhydra.kernels.attention.mosaic.backward_shared import KeyWorker, SplitWorker, ValueWorker
from maxhydra.kernels.attention.mosaic.common import COMPILER_PARAMS, shared_segment_ranges
from maxhydra.kernels.attention.mosaic.forward import forward
from maxhydra.kernels.attention.spec import CHECKPOINT_NAME
from maxhydra.kernels.mosaic import WORKERS


@partial(jax.jit, static_argnums=0)
def backward(params: KernelParams, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values."""
    (B, S, K, H), dtype = inputs.k_BSKH.shape, inputs.k_BSKH.dtype
    sizes, has_segments = Sizes.of(inputs, params.tiles.backward), inputs.q_segments_BT is not None
    scratch = Memory.of(sizes, dtype, has_segments=has_segments), Barriers.of(sizes, has_segments=has_segments)

    def kernel(*arrays: Any) -> None:
        def run(*scratch: Any) -> None:
            _run(Program(params, sizes, *arrays, *scratch))

        pl.run_scoped(run, *scratch, collective_axes="warpgroup")

    segment_ranges = None
    if has_segments:
        segment_ranges = shared_segment_ranges(
            inputs.kv_segments_BS, inputs.q_segments_BT, rows=sizes.keys, columns=sizes.C
        )
    kv_shape = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    d_q_ref = jax.new_ref(_deferred_zeros(rows, inputs.q_BTNH.shape))
    d_k_BSKH, d_v_BSKH = pl.kernel(
        kernel,
        out_type=(kv_shape, kv_shape),
        mesh=plgpu.Mesh(
            grid=(B, K, S // sizes.keys),
            grid_names=("b", "k", "block"),
            num_threads=WORKERS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=COMPILER_PARAMS,
        name="attention_backward",
    )(inputs, rows, segment_ranges, d_q_ref)
    d_q_BTNH = (d_q_ref[...] * params.request.scale).astype(dtype)
    return d_q_BTNH, d_k_BSKH, d_v_BSKH


def _deferred_zeros(rows: Rows, shape: tuple[int, ...]) -> jax.Array:
    """Float32 zeros that depend on the rows.

    Otherwise the compiler would allocate those of all layers at the start of the backward pass and hold them all.
    """
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), jnp.float32), rows))
    return jnp.broadcast_to(zero, shape)


def _run(program: Program) -> None:
    worker, ranges = jax.lax.axis_index("warpgroup"), program.ranges
    pl.when(worker == WORKERS)(partial(program.load, ranges))
    if not program.sizes.is_pipelined:
        pl.when(worker < WORKERS)(partial(_compute, SplitWorker(program, worker), ranges))
        return
    kinds: tuple[type[Worker], type[Worker]] = (
        (ValueWorker, KeyWorker) if program.sizes.is_shared else (SplitWorker, SplitWorker)
    )
    for known, kind in enumerate(kinds):
        pl.when(worker == known)(partial(_compute, kind(program, known), ranges))


def _compute(worker: Worker, ranges: Ranges) -> None:
    plgpu.set_max_registers(240, action="increase")
    worker.run(ranges)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(params: KernelParams, inputs: Inputs) -> jax.Array:
    """Attention with the forward and the backward kernel as its VJP."""
    return forward(params, inputs)[0]


def _forward(params: KernelParams, inputs: Inputs) -> tuple[jax.Array, tuple[Inputs, jax.Array, jax.Array]]:
    out_BTNH, total_BNT = checkpoint_name(forward(params, inputs), CHECKPOINT_NAME)
    return out_BTNH, (inputs, out_BTNH, total_BNT)


def _backward(
    params: KernelParams, residuals: tuple[Inputs, jax.Array, jax.Array], d_out_BTNH: jax.Array
) -> tuple[Inputs]:
    inputs, out_BTNH, total_BNT = residuals
    rows = Rows.of(out_BTNH, total_BNT, d_out_BTNH)
    d_q_BTNH, d_k_BSKH, d_v_BSKH = backward(params, inputs, rows)
    return (Inputs(d_q_BTNH, d_k_BSKH, d_v_BSKH, rows.d_sinks(inputs), None, None),)


attend.defvjp(_forward, _backward)
