"""The backward kernel: a program has 128 or 64 keys and goes over all queries that see them; two warpgroups compute.

Everything is turned, keys by queries, so that the weights and their gradients are left operands, which may come from
registers; the gradients of keys and values stay there too. That of the queries is summed in memory, in float32, in the
order in which programs come to it, so two runs differ by rounding.

How the warpgroups share the work is in apart.py and together.py. Where registers are short, each warpgroup has code of
its own: with its number known, places in shared memory are constants, where they would take registers that the sums
need.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs, Ranges, Rows
from maxhydra.kernels.attention.mosaic.backward_program import Program, Worker
from maxhydra.kernels.attention.mosaic.backward_shared import OfKeys, OfValues
from maxhydra.kernels.attention.mosaic.backward_smem import Barriers, Memory, Sizes
from maxhydra.kernels.attention.mosaic.backward_split import Apart
from maxhydra.kernels.attention.mosaic.common import PARAMS, meetings
from maxhydra.kernels.attention.mosaic.params import How
from maxhydra.kernels.mosaic import WORKERS


@partial(jax.jit, static_argnums=0)
def backward(how: How, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values."""
    (B, S, K, H), dtype = inputs.k_BSKH.shape, inputs.k_BSKH.dtype
    sizes, is_tagged = Sizes.of(inputs, how.tiles.backward), inputs.q_segments_BT is not None
    scratch = Memory.of(sizes, dtype, is_tagged=is_tagged), Barriers.of(sizes, is_tagged=is_tagged)

    def kernel(*arrays: Any) -> None:
        def run(*scratch: Any) -> None:
            _run(Program(how, sizes, *arrays, *scratch))

        pl.run_scoped(run, *scratch, collective_axes="warpgroup")

    met = None
    if is_tagged:
        met = meetings(inputs.kv_segments_BS, inputs.q_segments_BT, rows=sizes.keys, columns=sizes.C)
    of_keys = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    d_q_ref = jax.new_ref(_zeros_once_there(rows, inputs.q_BTNH.shape))
    d_k_BSKH, d_v_BSKH = pl.kernel(
        kernel,
        out_type=(of_keys, of_keys),
        mesh=plgpu.Mesh(
            grid=(B, K, S // sizes.keys),
            grid_names=("b", "k", "block"),
            num_threads=WORKERS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=PARAMS,
        name="attention_backward",
    )(inputs, rows, met, d_q_ref)
    d_q_BTNH = (d_q_ref[...] * how.request.scale).astype(dtype)
    return d_q_BTNH, d_k_BSKH, d_v_BSKH


def _zeros_once_there(rows: Rows, shape: tuple[int, ...]) -> jax.Array:
    """Float32 zeros, made when the rows are there: else the compiler makes those of all layers at once, at the start of
    the backward pass, which then holds them all."""
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), jnp.float32), rows))
    return jnp.broadcast_to(zero, shape)


def _run(program: Program) -> None:
    worker, ranges = jax.lax.axis_index("warpgroup"), program.ranges
    pl.when(worker == WORKERS)(partial(program.load, ranges))
    if not program.sizes.is_ahead:
        pl.when(worker < WORKERS)(partial(_compute, Apart(program, worker), ranges))
        return
    kinds: tuple[type[Worker], type[Worker]] = (OfValues, OfKeys) if program.sizes.is_shared else (Apart, Apart)
    for known, kind in enumerate(kinds):
        pl.when(worker == known)(partial(_compute, kind(program, known), ranges))


def _compute(worker: Worker, ranges: Ranges) -> None:
    plgpu.set_max_registers(240, action="increase")
    worker.run(ranges)
