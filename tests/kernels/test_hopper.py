"""The simulated GPU detects synchronisation bugs that a real one mostly hides: kernels with one faulty line."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.hopper import Deadlock, run
from tests.support.hopper_memory import Race

BLOCKS, SIZE = 3, (64, 64)
WRONG = "values"
MISTAKES = {
    "no wait for a free slot": (Race, WRONG),
    "no wait for the load": (Race, WRONG),
    "no wait for the wgmma": (Race,),
    "no wait for the previous copy": (Race,),
    "no wait for the last copy": (Race,),
    "no commit": (Race,),
    "slot freed too early": (Race,),
    "no initial free slot": (Deadlock,),
    "no freed slot": (Deadlock,),
}


def matmul_kernel(mistake, x_ref, y_ref, out_ref, left, right, out, left_ready, right_ready, free):
    """out[i] = x[i] @ y; one warpgroup loads the blocks into a single slot for another."""

    def unless(name, function, *arguments):
        if name != mistake:
            function(*arguments)

    def load():
        plgpu.copy_gmem_to_smem(y_ref, right, right_ready)
        for i in range(BLOCKS):
            unless("no wait for a free slot", plgpu.barrier_wait, free)
            plgpu.copy_gmem_to_smem(x_ref.at[i], left, left_ready)

    def step(i, sums):
        unless("no wait for the load", plgpu.barrier_wait, left_ready)
        plgpu.wgmma(sums, left, right)
        if mistake == "slot freed too early":
            plgpu.barrier_arrive(free)
        result = plgpu.wgmma_accumulator_load(sums, wait_n=int(mistake == "no wait for the wgmma"))
        if mistake not in ("slot freed too early", "no freed slot"):
            plgpu.barrier_arrive(free)
        unless("no wait for the previous copy", plgpu.wait_smem_to_gmem, 0)
        out[...] = result
        unless("no commit", plgpu.commit_smem)
        plgpu.copy_smem_to_gmem(out, out_ref.at[i])

    def compute():
        unless("no initial free slot", plgpu.barrier_arrive, free)
        plgpu.barrier_wait(right_ready)
        for i in range(BLOCKS):
            pl.run_scoped(partial(step, i), plgpu.ACC(SIZE, jnp.float32))
        unless("no wait for the last copy", plgpu.wait_smem_to_gmem, 0)

    worker = jax.lax.axis_index("warpgroup")
    pl.when(worker == 0)(compute)
    pl.when(worker == 1)(load)


def outcome(mistake, seed):
    """The exception type, or WRONG for wrong values; None if the run is correct."""
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=size).astype(jnp.bfloat16) for size in ((BLOCKS, *SIZE), SIZE))
    kernel = plgpu.kernel(
        partial(matmul_kernel, mistake),
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=(
            *(plgpu.SMEM(SIZE, dtype) for dtype in (jnp.bfloat16, jnp.bfloat16, jnp.float32)),
            *(plgpu.Barrier() for _ in range(3)),
        ),
        num_threads=2,
        thread_name="warpgroup",
    )
    try:
        out = run(kernel, x, y, seed=seed)
    except (Race, Deadlock) as error:
        return type(error)
    return None if np.allclose(out, x.astype(np.float64) @ y.astype(np.float64), atol=1e-4) else WRONG


def test_a_correct_kernel_equals_numpy():
    assert {outcome(None, seed) for seed in range(8)} == {None}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_detected_within_a_few_interleavings(mistake):
    outcomes = {outcome(mistake, seed) for seed in range(8)} - {None}
    assert outcomes and outcomes <= set(MISTAKES[mistake])
