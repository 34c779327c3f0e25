"""The GPU of hopper.py finds what a real one forgives most of the time: a kernel that is right but for one line."""

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
    "no wait for a free place": (Race, WRONG),
    "no wait for what is loaded": (Race, WRONG),
    "no wait for the product": (Race,),
    "no wait for the copy before": (Race,),
    "no wait for the last copy": (Race,),
    "no commit": (Race,),
    "a place is free too early": (Race,),
    "no first free place": (Deadlock,),
    "no free place": (Deadlock,),
}


def product(mistake, x_ref, y_ref, out_ref, left, right, out, left_here, right_here, free):
    """out[i] = x[i] @ y, of blocks that one warpgroup loads into the same place for another."""

    def unless(name, act, *arguments):
        if name != mistake:
            act(*arguments)

    def load():
        plgpu.copy_gmem_to_smem(y_ref, right, right_here)
        for i in range(BLOCKS):
            unless("no wait for a free place", plgpu.barrier_wait, free)
            plgpu.copy_gmem_to_smem(x_ref.at[i], left, left_here)

    def step(i, sums):
        unless("no wait for what is loaded", plgpu.barrier_wait, left_here)
        plgpu.wgmma(sums, left, right)
        if mistake == "a place is free too early":
            plgpu.barrier_arrive(free)
        made = plgpu.wgmma_accumulator_load(sums, wait_n=int(mistake == "no wait for the product"))
        if mistake not in ("a place is free too early", "no free place"):
            plgpu.barrier_arrive(free)
        unless("no wait for the copy before", plgpu.wait_smem_to_gmem, 0)
        out[...] = made
        unless("no commit", plgpu.commit_smem)
        plgpu.copy_smem_to_gmem(out, out_ref.at[i])

    def compute():
        unless("no first free place", plgpu.barrier_arrive, free)
        plgpu.barrier_wait(right_here)
        for i in range(BLOCKS):
            pl.run_scoped(partial(step, i), plgpu.ACC(SIZE, jnp.float32))
        unless("no wait for the last copy", plgpu.wait_smem_to_gmem, 0)

    worker = jax.lax.axis_index("warpgroup")
    pl.when(worker == 0)(compute)
    pl.when(worker == 1)(load)


def outcome(mistake, seed):
    """What is raised, or WRONG; None where all is well."""
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=size).astype(jnp.bfloat16) for size in ((BLOCKS, *SIZE), SIZE))
    kernel = plgpu.kernel(
        partial(product, mistake),
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=(
            *(plgpu.SMEM(SIZE, dtype) for dtype in (jnp.bfloat16, jnp.bfloat16, jnp.float32)),
            *(plgpu.Barrier() for _ in range(3)),
        ),
        num_threads=2,
        thread_name="warpgroup",
    )
    try:
        found = run(kernel, x, y, seed=seed)
    except (Race, Deadlock) as error:
        return type(error)
    return None if np.allclose(found, x.astype(np.float64) @ y.astype(np.float64), atol=1e-4) else WRONG


def test_a_kernel_without_mistakes_has_the_values_of_numpy():
    assert {outcome(None, seed) for seed in range(8)} == {None}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_in_a_few_orders_of_events(mistake):
    found = {outcome(mistake, seed) for seed in range(8)} - {None}
    assert found and found <= set(MISTAKES[mistake])
