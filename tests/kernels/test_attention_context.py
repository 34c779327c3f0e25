"""Context parallelism on simulated devices against the reference on one, values and gradients in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxhydra.kernels.attention import attention
from maxhydra.kernels.placement import Placement
from tests.kernels.test_attention import make_request

BATCH, LENGTH, HEAD_DIM = 2, 48, 8
STRATEGIES = ("ring", "ulysses", "all_gather")
# Query and key heads, devices along rows, length and heads, and fields of the request or arrays.
CASES = {
    "causal, key heads fewer than devices": ((8, 2), (1, 4, 2), {}),
    "causal, one key head, odd length of a device": ((4, 1), (2, 4, 1), {"length": 36}),
    "segments, softcap and sinks": ((8, 4), (2, 2, 2), {"segments": True, "softcap": 2.0, "sinks": True}),
    "window within the neighbour": ((4, 2), (2, 4, 1), {"window": 7, "segments": True, "sinks": True}),
    "window over two neighbours": ((4, 2), (1, 4, 1), {"window": 20}),
    "chunk": ((4, 4), (1, 4, 1), {"chunk": 10, "softcap": 2.0}),
    "not causal, larger keys than values": ((4, 4), (1, 4, 1), {"causal": False, "value_dim": 4}),
}


def make_place(strategy: str, sizes: tuple[int, int, int]) -> Placement:
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, ("rows", "length", "heads"), axis_types=(AxisType.Auto,) * 3, devices=devices)
    heads = "heads" if sizes[2] > 1 else None
    return Placement("cpu", mesh, "rows", heads, heads, "length", strategy)


def make_case(name: str):
    (N, K), sizes, fields = CASES[name]
    fields = dict(fields)
    T, V = fields.pop("length", LENGTH), fields.pop("value_dim", HEAD_DIM)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (BATCH, T, N, HEAD_DIM), (BATCH, T, K, HEAD_DIM), (BATCH, T, K, V)
    arrays = {name: jax.random.normal(key, shape) for name, key, shape in zip("qkv", keys, shapes, strict=True)}
    if fields.pop("sinks", False):
        arrays["sinks"] = jnp.linspace(-1.0, 2.0, N)
    ids = np.repeat([[1, 2, 3, 0], [0, 1, 2, 3]], [T // 3, 5, T - 7 - T // 3, 2], axis=1).astype(np.int32)
    segments = ids if fields.pop("segments", False) else None
    return arrays, segments, make_request(**fields), sizes


def value_and_grads(arrays, segments, request, **options):
    """Output and gradients of a fixed random projection of it."""
    T, N, V = *arrays["q"].shape[1:3], arrays["v"].shape[3]
    probe = jax.random.normal(jax.random.key(1), (BATCH, T, N, V))

    def project(arrays):
        q, k, v = (arrays[name] for name in "qkv")
        tokens = {} if segments is None else {"q_segments_BT": segments, "kv_segments_BS": segments}
        out = attention(q, k, v, request, sinks_N=arrays.get("sinks"), **tokens, **options)
        return jnp.sum(out * probe), out

    return jax.jit(jax.value_and_grad(project, has_aux=True))(arrays)


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_equals_one_device(case):
    arrays, segments, request, sizes = make_case(case)
    (_, expected), expected_grads = value_and_grads(arrays, segments, request, backend="reference")
    for strategy in STRATEGIES:
        place = make_place(strategy, sizes)
        (_, out), grads = value_and_grads(arrays, segments, request, backend="auto", place=place)
        np.testing.assert_allclose(out, expected, atol=1e-5, err_msg=strategy)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, expected_grads[name], atol=1e-4, err_msg=f"{strategy}: {name}")
