"""The GPU of hopper.py finds what real ones forgive most of the time: each kernel here is right but for one line."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import Deadlock, run
from hopper_memory import Race
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SIZE = (64, 64)


def product(without, x_ref, y_ref, out_ref, left, right, out, here, free):
    """out[i] = x[i] @ y for two blocks of x, which one warpgroup loads into the same place for another."""

    def unless(mistake, act, *arguments):
        if mistake not in without:
            act(*arguments)

    def load():
        plgpu.copy_gmem_to_smem(y_ref, right, here)
        for i in range(2):
            unless("free", plgpu.barrier_wait, free)
            plgpu.copy_gmem_to_smem(x_ref.at[i], left, here)

    def step(i, acc):
        unless("here", plgpu.barrier_wait, here)
        plgpu.wgmma(acc, left, right)
        unless("product", plgpu.wgmma_wait, 0)
        unless("arrival", plgpu.barrier_arrive, free)
        unless("store", plgpu.wait_smem_to_gmem, 0)
        out[...] = plgpu.wgmma_accumulator_load(acc, wait_n=1 if "accumulator" in without else 0).astype(out.dtype)
        unless("commit", plgpu.commit_smem)
        plgpu.copy_smem_to_gmem(out, out_ref.at[i])

    def compute():
        unless("first arrival", plgpu.barrier_arrive, free)
        # The other operand came with the first block's barrier.
        for i in range(2):
            pl.run_scoped(partial(step, i), plgpu.ACC(SIZE, jnp.float32))
        unless("end", plgpu.wait_smem_to_gmem, 0)

    worker = jax.lax.axis_index("warpgroup")
    pl.when(worker == 0)(compute)
    pl.when(worker == 1)(load)


def multiply(x, y, *, without, seed):
    kernel = plgpu.kernel(
        partial(product, without),
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        scratch_types=(*[plgpu.SMEM(SIZE, jnp.bfloat16)] * 3, plgpu.Barrier(num_arrivals=1), plgpu.Barrier()),
        num_threads=2,
        thread_name="warpgroup",
    )
    return run(kernel, x, y, seed=seed)
