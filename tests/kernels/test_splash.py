"""The splash attention backend in interpret mode against the reference."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxhydra.kernels.attention import BACKENDS, attention, reference, splash
from maxhydra.kernels.attention.spec import TokenInfo
from maxhydra.kernels.placement import Placement
from tests.kernels.test_attention import MASKS, assert_near_in_bfloat16, make_inputs, make_request, tags

# Two blocks of queries by two of keys.
LENGTH = 256
CASES = {
    "full": MASKS["full"],
    "window_softcap_segments_sinks": {"window": 40, "softcap": 2.0, "segments": True, "sinks": True},
    "chunk_segments": {"chunk": 96, "segments": True},
}


def value_and_grads(run, inputs, request, tokens, sinks):
    probe = jax.random.normal(jax.random.key(1), inputs[0].shape)

    def project(inputs, sinks):
        out = run(*inputs, request, tokens, sinks)
        return jnp.sum(out.astype(jnp.float32) * probe), out

    (_, out), grads = jax.jit(jax.value_and_grad(project, argnums=(0, 1), has_aux=True))(inputs, sinks)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves((out, grads))]


def make_case(mask: dict, dtype=jnp.float32):
    arrays = tags(mask, LENGTH)
    segments = arrays.get("q_segments_BT")
    inputs = make_inputs((4, 2), dtype, length=LENGTH, head_dim=16)
    return inputs, make_request(**mask), TokenInfo(segments, segments, None, None), arrays.get("sinks_N")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "BLOCKS", (128,))


@pytest.mark.slow
@pytest.mark.default_cases("window_softcap_segments_sinks")
@pytest.mark.parametrize("mask", CASES)
def test_values_and_gradients_equal_the_reference(mask, small_blocks):
    case = make_case(dict(CASES[mask]))
    expected = value_and_grads(reference.attention, *case)
    got = value_and_grads(partial(splash.attention, interpret=True), *case)
    for actual, desired in zip(got, expected, strict=True):
        np.testing.assert_allclose(actual, desired, atol=3e-5)


@pytest.mark.slow
def test_bfloat16_is_near_the_reference_over_a_mesh(small_blocks, monkeypatch):
    """Rows sharded over two devices, heads over two; the gradient of sinks is a sum over rows on both."""
    case = make_case({"window": 100, "segments": True, "sinks": True}, jnp.bfloat16)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    place = Placement("tpu", mesh, batch="rows", heads="heads", kv_heads="heads")
    interpreted = dataclasses.replace(
        BACKENDS["splash"], run=partial(splash.attention, interpret=True), platforms=("tpu",)
    )
    monkeypatch.setitem(BACKENDS, "splash", interpreted)

    def run(q, k, v, request, tokens, sinks):
        return attention(q, k, v, request, backend="splash", sinks_N=sinks, place=place, **tokens._asdict())

    for got, want in zip(value_and_grads(run, *case), value_and_grads(reference.attention, *case), strict=True):
        assert_near_in_bfloat16(got, want)


def test_blocks_divide_the_length():
    assert BACKENDS["splash"].length_multiple == 128
    sizes = [splash._blocks(length, length).block_q for length in (128, 384, 768, 4096)]
    assert sizes == [128, 128, 256, 512]


@pytest.mark.exhaustive
def test_keys_before_the_first_query(small_blocks):
    inputs, _, tokens, _ = make_case({"segments": True})
    inputs, request = [inputs[0][:, 128:], *inputs[1:]], make_request(window=60, offset=128)
    case = inputs, request, tokens._replace(q_segments_BT=tokens.q_segments_BT[:, 128:]), None
    expected, got = (
        value_and_grads(run, *case) for run in (reference.attention, partial(splash.attention, interpret=True))
    )
    for actual, desired in zip(got, expected, strict=True):
        np.testing.assert_allclose(actual, desired, atol=3e-5)
