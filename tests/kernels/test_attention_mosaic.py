"""The Hopper attention kernels without a Hopper GPU.

The simulator in tests/support/hopper.py runs the kernels, and their values and gradients are compared with the
reference; they are lowered for the real GPU, wgmma layouts included; every tile of queries is assigned once. On a GPU,
test_attention.py and bench/kernels.py run them.
"""

import dataclasses
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.kernels.attention import reference, triton
from maxhydra.kernels.attention.blocks import Inputs, Rows
from maxhydra.kernels.attention.mosaic import TILES, KernelParams, Tile, attention, block_backward, block_forward
from maxhydra.kernels.attention.mosaic.backward import attend
from maxhydra.kernels.attention.mosaic.common import TilePlan, shared_segment_ranges
from maxhydra.kernels.attention.partials import Partial
from maxhydra.kernels.attention.spec import CHECKPOINT_NAME, Request, TokenInfo
from tests.support.hopper import run

PLAIN = {"scale": 0.1, "causal": True, "window": None, "chunk": None, "softcap": None}


def make_request(**changes) -> Request:
    return Request(**{**PLAIN, "softmax_dtype": "float32", **changes})


def make_inputs(B: int, T: int, N: int, K: int, H: int) -> Inputs:
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K))
    return Inputs(q, k, k, None, None, None)


LENGTH = 256
# Head size, query and key heads, request options; each loop with and without a mask, and all options at once.
CASES = {
    "plain 64": (64, (2, 1), {}),
    "plain 128": (128, (2, 1), {}),
    "full 64": (64, (1, 1), {"causal": False, "sinks": True}),
    "full 128": (128, (1, 1), {"causal": False, "softcap": 2.0}),
    "window 64": (64, (1, 1), {"window": 150, "softcap": 2.0}),
    "window 128": (128, (1, 1), {"window": 150, "sinks": True}),
    "chunk 64": (64, (1, 1), {"chunk": 96}),
    "chunk 128": (128, (1, 1), {"chunk": 96, "softcap": 2.0}),
    "all 64": (64, (4, 2), {"window": 100, "softcap": 2.0, "sinks": True, "segments": True}),
    "all 128": (128, (2, 1), {"chunk": 130, "softcap": 2.0, "sinks": True, "segments": True}),
    "plain 256": (256, (2, 1), {}),
    "full 256": (256, (1, 1), {"causal": False, "softcap": 2.0}),
    "chunk 256": (256, (1, 1), {"chunk": 96}),
    "all 256": (256, (2, 1), {"window": 100, "softcap": 2.0, "sinks": True, "segments": True}),
}


@pytest.mark.slow
@pytest.mark.default_cases("plain 64", "full 128", "chunk 128", "all 64", "all 128", "all 256")
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_reference(case):
    """One program processes all tiles of the forward pass, and cycles through its shared memory slots several times."""
    head_dim, (N, K), options = CASES[case]
    options, dtype = dict(options), jnp.float16 if "chunk" in case else jnp.bfloat16
    shapes = [(1, LENGTH, heads, head_dim) for heads in (N, K, K, N)]
    rng = np.random.default_rng(0)
    q, k, v, d = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    sinks = np.linspace(4, 6, N, dtype=np.float32) if options.pop("sinks", False) else None
    segments = None
    if options.pop("segments", False):
        segments = np.repeat([[1, 2, 3, 0]], [70, 30, 140, 16], axis=1).astype(np.int32)
    request = make_request(**options)
    tiles = TILES[head_dim]
    params = KernelParams(request, tiles._replace(forward=Tile(64, 3)) if case == "all 128" else tiles, programs=1)

    def by_mosaic(q, k, v, sinks):
        return attend(params, Inputs(q, k, v, sinks, segments, segments))

    def by_reference(q, k, v, sinks):
        return reference.attention(q, k, v, request, TokenInfo(segments, segments, None, None), sinks)

    def value_and_grads(function, q, k, v, sinks, d):
        out, backward = jax.vjp(function, q, k, v, sinks)
        return [out, *(grad for grad in backward(d) if grad is not None)]

    actual = run(partial(value_and_grads, by_mosaic), q, k, v, sinks, d)
    *wide, wide_d = (x.astype(np.float32) for x in (q, k, v, d))
    expected = jax.jit(partial(value_and_grads, by_reference))(*wide, sinks, wide_d)
    for got, want in zip(actual, expected, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float32) - want)
        # The gradients of sinks are sums that nearly cancel.
        assert error < (0.004 if want.ndim > 1 else 0.02) * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("is_window", [True, False])
def test_earlier_keys_as_an_offset_and_as_a_block_of_their_own(is_window):
    """128 queries over their own keys and 128 earlier ones, some of which share no segment with any query."""
    rng = np.random.default_rng(0)
    q, k, v, d = (rng.normal(size=(1, length, 1, 64)).astype(jnp.bfloat16) for length in (128, 256, 256, 128))
    kv_segments = np.repeat([[1, 2, 3, 0]], [70, 80, 90, 16], axis=1).astype(np.int32)
    segments, request = kv_segments[:, 128:], make_request(window=90 if is_window else None, offset=128, softcap=2.0)

    def by_offset(q, k, v, d):
        def run(q, k, v):
            return attention(q, k, v, request, TokenInfo(segments, kv_segments, None, None), None)

        out, backward = jax.vjp(run, q, k, v)
        return [out, *backward(d)]

    def by_block(q, k, v, d):
        own = dataclasses.replace(request, offset=0)
        requests = dataclasses.replace(own, causal=False), own
        inputs = [
            Inputs(q, k[:, at], v[:, at], None, segments, kv_segments[:, at]) for at in np.split(np.arange(256), 2)
        ]
        earlier, later = (Partial(*block_forward(*pair)) for pair in zip(requests, inputs, strict=True))
        out, total = earlier.merge(later)
        rows = Rows.of(out, total, d)
        d_q, d_k, d_v = zip(*(block_backward(*pair, rows) for pair in zip(requests, inputs, strict=True)), strict=True)
        return [out, d_q[0] + d_q[1], jnp.concatenate(d_k, axis=1), jnp.concatenate(d_v, axis=1)]

    def by_reference(q, k, v, d):
        tokens = TokenInfo(segments, kv_segments, None, None)
        out, backward = jax.vjp(lambda q, k, v: reference.attention(q, k, v, request, tokens, None), q, k, v)
        return [out, *backward(d)]

    actual = run(by_offset if is_window else by_block, q, k, v, d)
    for got, want in zip(actual, by_reference(*(x.astype(np.float32) for x in (q, k, v, d))), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float32) - want) < 0.006 * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.default_cases("128-changes0-False-False")
@pytest.mark.parametrize(
    ("head_dim", "changes", "has_segments", "has_sinks"),
    [(128, {}, False, False), (64, {"window": 100, "softcap": 20.0}, False, True), (256, {"chunk": 64}, True, False)],
)
def test_the_kernels_lower_for_hopper_with_their_gradients(head_dim, changes, has_segments, has_sinks):
    inputs, request = make_inputs(1, 256, 2, 1, head_dim), make_request(**changes)
    segments = jax.ShapeDtypeStruct((1, 256), jnp.int32) if has_segments else None
    sinks = jax.ShapeDtypeStruct((2,), jnp.float32) if has_sinks else None

    def gradients(q, k, v, sinks, segments, d):
        tokens = TokenInfo(segments, segments, None, None)
        return jax.vjp(lambda q, k, v, sinks: attention(q, k, v, request, tokens, sinks), q, k, v, sinks)[1](d)

    traced = jax.jit(gradients).trace(*inputs[:3], sinks, segments, inputs.q_BTNH)
    assert [info.dtype for info in traced.out_info[:3]] == [jnp.bfloat16] * 3
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2


@pytest.mark.parametrize("run", [attention, triton.attention])
def test_remat_can_save_the_residuals_of_the_kernels(run):
    """The outputs and the sums that the backward pass reads, in addition to the layer's inputs."""
    inputs, no_masks = make_inputs(1, 256, 2, 1, 64), TokenInfo(None, None, None, None)

    def layer(q, k, v):
        return run(q, k, v, make_request(), no_masks, None)

    rematted = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME))
    backward = jax.eval_shape(lambda *inputs: jax.vjp(rematted, *inputs)[1], *inputs[:3])
    shapes = Counter((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(backward))
    assert shapes[(1, 2, 256), "float32"] == 1 and shapes[(1, 256, 2, 64), "bfloat16"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"causal": False}, {"window": 200}, {"chunk": 256}])
def test_each_tile_of_queries_is_assigned_once_and_evenly(changes):
    inputs = make_inputs(2, 1024, 8, 2, 64)
    params = KernelParams(make_request(**changes), TILES[64], 10)
    plan = TilePlan.of(inputs, params)
    assigned = [[int(tile) for tile in row[1 : row[0] + 1]] for row in plan.schedule(params)]
    positions = Counter(tuple(map(int, plan.position(jnp.int32(tile)))) for row in assigned for tile in row)
    assert set(positions.values()) == {1}
    assert set(positions) == {(b, n, start) for b in range(2) for n in range(8) for start in range(0, 1024, 128)}
    keys = [sum(int(plan.position(jnp.int32(tile))[2]) + 256 for tile in row) for row in assigned]
    assert len(assigned) == 10 and (changes or max(keys) - min(keys) <= 1024)


@pytest.mark.slow
def test_every_pair_of_one_segment_is_within_the_block_range():
    rng = np.random.default_rng(0)
    q, kv = rng.integers(0, 4, (3, 12)).cumsum(axis=1) % 9, np.sort(rng.integers(0, 9, (3, 16)), axis=1)
    ranges = np.asarray(shared_segment_ranges(jnp.asarray(q), jnp.asarray(kv), rows=3, columns=2))
    for b, block in np.ndindex(3, 4):
        segments = q[b, 3 * block : 3 * block + 3]
        shared = [
            j for j in range(8) if np.any((segments[:, None] == kv[b, 2 * j : 2 * j + 2]) & (segments[:, None] != 0))
        ]
        first, beyond = ranges[b, block]
        assert all(first <= j < beyond for j in shared)
    assert (ranges[..., 1] - ranges[..., 0]).mean() < 6
