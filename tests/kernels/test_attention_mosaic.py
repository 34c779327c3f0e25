"""Attention for Hopper where there is none: hopper.py runs the kernels, and their values and gradients are those of the
reference; they lower for the real one, the matrix unit's layouts included; all tiles of queries are dealt out once. The
GPU itself has test_attention.py and bench/kernels.py."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.kernels.attention import reference, triton
from maxhydra.kernels.attention.blocks import Inputs
from maxhydra.kernels.attention.mosaic import TILES, attention
from maxhydra.kernels.attention.mosaic.common import meetings
from maxhydra.kernels.attention.mosaic.params import How, Tile
from maxhydra.kernels.attention.mosaic.tile_schedule import Plan
from maxhydra.kernels.attention.mosaic.vjp import attend
from maxhydra.kernels.attention.spec import KEPT, Request, TokenInfo
from tests.support.hopper import run

PLAIN = {"scale": 0.1, "causal": True, "window": None, "chunk": None, "softcap": None}


def make_request(**changes) -> Request:
    return Request(**{**PLAIN, "softmax_dtype": "float32", "is_length_split": False, **changes})


def make_inputs(B: int, T: int, N: int, K: int, H: int) -> Inputs:
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K))
    return Inputs(q, k, k, None, None, None)


LENGTH = 256
# Head size, heads of queries and of keys, what is asked for; each loop with and without a mask, and all at once.
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


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_reference(case):
    """One program goes over all tiles forward, and over its rings of shared memory several times."""
    head_dim, (N, K), asked = CASES[case]
    asked, dtype = dict(asked), jnp.float16 if "chunk" in case else jnp.bfloat16
    shapes = [(1, LENGTH, heads, head_dim) for heads in (N, K, K, N)]
    rng = np.random.default_rng(0)
    q, k, v, d = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    sinks = np.linspace(4, 6, N, dtype=np.float32) if asked.pop("sinks", False) else None
    tags = None
    if asked.pop("segments", False):
        tags = np.repeat([[1, 2, 3, 0]], [70, 30, 140, 16], axis=1).astype(np.int32)
    request = make_request(**asked)
    tiles = TILES[head_dim]
    how = How(request, tiles._replace(forward=Tile(64, 3)) if case == "all 128" else tiles, programs=1)

    def by_mosaic(q, k, v, sinks):
        return attend(how, Inputs(q, k, v, sinks, tags, tags))

    def by_reference(q, k, v, sinks):
        return reference.attention(q, k, v, request, TokenInfo(tags, tags, None, None), sinks)

    def whole(function, q, k, v, sinks, d):
        out, backward = jax.vjp(function, q, k, v, sinks)
        return [out, *(one for one in backward(d) if one is not None)]

    found = run(partial(whole, by_mosaic), q, k, v, sinks, d)
    *wide, wide_d = (one.astype(np.float32) for one in (q, k, v, d))
    wanted = jax.jit(partial(whole, by_reference))(*wide, sinks, wide_d)
    for got, want in zip(found, wanted, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float32) - want)
        # The gradients of sinks are sums that nearly cancel.
        assert error < (0.004 if want.ndim > 1 else 0.02) * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("head_dim", "changes", "is_tagged", "has_sinks"),
    [(128, {}, False, False), (64, {"window": 100, "softcap": 20.0}, False, True), (256, {"chunk": 64}, True, False)],
)
def test_the_kernels_lower_for_hopper_with_their_gradients(head_dim, changes, is_tagged, has_sinks):
    inputs, request = make_inputs(1, 256, 2, 1, head_dim), make_request(**changes)
    segments = jax.ShapeDtypeStruct((1, 256), jnp.int32) if is_tagged else None
    sinks = jax.ShapeDtypeStruct((2,), jnp.float32) if has_sinks else None

    def gradients(q, k, v, sinks, segments, d):
        tokens = TokenInfo(segments, segments, None, None)
        return jax.vjp(lambda q, k, v, sinks: attention(q, k, v, request, tokens, sinks), q, k, v, sinks)[1](d)

    traced = jax.jit(gradients).trace(*inputs[:3], sinks, segments, inputs.q_BTNH)
    assert [one.dtype for one in traced.out_info[:3]] == [jnp.bfloat16] * 3
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2


@pytest.mark.parametrize("run", [attention, triton.attention])
def test_a_layer_can_keep_what_the_kernels_return(run):
    """The values and the sums that the backward pass reads, next to the layer's inputs."""
    inputs, nothing = make_inputs(1, 256, 2, 1, 64), TokenInfo(None, None, None, None)

    def layer(q, k, v):
        return run(q, k, v, make_request(), nothing, None)

    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
    backward = jax.eval_shape(lambda *inputs: jax.vjp(kept, *inputs)[1], *inputs[:3])
    shapes = Counter((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(backward))
    assert shapes[(1, 2, 256), "float32"] == 1 and shapes[(1, 256, 2, 64), "bfloat16"] == 2


@pytest.mark.parametrize("changes", [{}, {"causal": False}, {"window": 200}, {"chunk": 256}])
def test_each_tile_of_queries_is_dealt_out_once_and_evenly(changes):
    inputs = make_inputs(2, 1024, 8, 2, 64)
    how = How(make_request(**changes), TILES[64], 10)
    plan = Plan.of(inputs, how)
    dealt = [[int(tile) for tile in row[1 : row[0] + 1]] for row in plan.schedule(how)]
    places = Counter(tuple(map(int, plan.place(jnp.int32(tile)))) for row in dealt for tile in row)
    assert set(places.values()) == {1}
    assert set(places) == {(b, n, start) for b in range(2) for n in range(8) for start in range(0, 1024, 128)}
    keys = [sum(int(plan.place(jnp.int32(tile))[2]) + 256 for tile in row) for row in dealt]
    assert len(dealt) == 10 and (changes or max(keys) - min(keys) <= 1024)


def test_every_pair_of_one_segment_lies_between_the_blocks_that_meet():
    rng = np.random.default_rng(0)
    q, kv = rng.integers(0, 4, (3, 12)).cumsum(axis=1) % 9, np.sort(rng.integers(0, 9, (3, 16)), axis=1)
    found = np.asarray(meetings(jnp.asarray(q), jnp.asarray(kv), rows=3, columns=2))
    for b, block in np.ndindex(3, 4):
        of_block = q[b, 3 * block : 3 * block + 3]
        met = [
            j for j in range(8) if np.any((of_block[:, None] == kv[b, 2 * j : 2 * j + 2]) & (of_block[:, None] != 0))
        ]
        first, beyond = found[b, block]
        assert all(first <= j < beyond for j in met)
    assert (found[..., 1] - found[..., 0]).mean() < 6
