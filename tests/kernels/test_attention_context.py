"""Context parallelism on simulated devices against the reference on one, values and gradients in float32."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention import BACKENDS, UnsupportedError, attention, context, ring, triton
from maxhydra.kernels.attention.partials import BlockKernel
from maxhydra.kernels.placement import Placement
from maxhydra.model.block import Remat
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
    return Placement("cpu", mesh, batch="rows", heads="heads", kv_heads="heads", length="length", context=strategy)


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


# Each strategy's own path; the other cases are slow.
QUICK = ("segments, softcap and sinks", "window within the neighbour")


@pytest.mark.slow
@pytest.mark.default_cases("segments, softcap and sinks", "window over two neighbours")
@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_strategy_equals_one_device(case):
    arrays, segments, request, sizes = make_case(case)
    expected = value_and_grads(arrays, segments, request, backend="reference")
    for strategy in STRATEGIES:
        options = {"backend": "auto", "place": make_place(strategy, sizes)}
        assert_equal(value_and_grads(arrays, segments, request, **options), expected, strategy)


def test_minimal_remat_saves_the_exchanged_heads():
    """Queries, keys, values and outputs are exchanged once in each direction: 8 all-to-alls, none recomputed."""
    arrays, _, request, sizes = make_case("segments, softcap and sinks")
    place, remat = make_place("ulysses", sizes), Remat.of(config.Remat(policy=config.RematPolicy.minimal))

    def project(arrays):
        q, k, v = (arrays[name] for name in "qkv")
        return jnp.sum(jnp.square(attention(q, k, v, request, backend="xla", place=place)))

    program = jax.make_jaxpr(jax.grad(remat.wrap(project, in_loop=True)))(arrays)
    assert str(program).count("= all_to_all[") == 8


def assert_equal(got, expected, case: str, tolerance: float = 1.0):
    ((_, out), grads), ((_, expected_out), expected_grads) = got, expected
    np.testing.assert_allclose(out, expected_out, atol=1e-5 * tolerance, err_msg=case)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], atol=1e-4 * tolerance, err_msg=f"{case}: {name}")


@pytest.mark.slow
@pytest.mark.default_cases("all_gather")
@pytest.mark.parametrize("strategy", ["ulysses", "all_gather"])
def test_keys_that_every_device_has_already(strategy):
    """As with latent attention, whose keys are projected from gathered latents."""
    arrays, segments, request, sizes = make_case("segments, softcap and sinks")
    options = {"backend": "auto", "place": make_place(strategy, sizes), "has_whole_keys": True}
    expected = value_and_grads(arrays, segments, request, backend="reference")
    assert_equal(value_and_grads(arrays, segments, request, **options), expected, strategy)


@pytest.mark.slow
def test_a_selection_of_keys_is_gathered():
    arrays, segments, request, sizes = make_case("segments, softcap and sinks")
    selected = jax.random.bernoulli(jax.random.key(2), 0.5, (BATCH, LENGTH, LENGTH))
    expected = value_and_grads(arrays, segments, request, backend="reference", selected_BTS=selected)
    options = {"backend": "auto", "place": make_place("auto", sizes), "selected_BTS": selected}
    assert_equal(value_and_grads(arrays, segments, request, **options), expected, "selection")
    for strategy in ("ring", "ulysses"):
        with pytest.raises(UnsupportedError, match=r"sparse indexer.*supported backends: all_gather"):
            value_and_grads(arrays, segments, request, **options | {"place": make_place(strategy, sizes)})


def test_ulysses_rejects_heads_that_cannot_be_divided():
    arrays, segments, request, _ = make_case("window within the neighbour")
    with pytest.raises(UnsupportedError, match=r"divides, not 4 \(supported backends: ring, all_gather\)"):
        value_and_grads(arrays, segments, request, backend="auto", place=make_place("ulysses", (1, 8, 1)))


@pytest.mark.parametrize(
    ("num_heads", "changes", "strategy"),
    [(8, {}, "ulysses"), (12, {}, "ring"), (8, {"window": 4}, "all_gather"), (8, {"chunk": 4}, "all_gather")],
)
def test_auto_goes_by_heads_and_masks(num_heads, changes, strategy):
    place = make_place("auto", (1, 4, 2))
    chosen = context.choose_strategy(place, make_request(**changes), num_heads=num_heads, has_selection=False)
    assert chosen == strategy


def test_neighbours_are_fetched_as_far_as_the_window_reaches():
    reach = [context.halo(make_request(window=window), 1024, 8) for window in (1, 2, 129, 130, 1025, 1026, 9000)]
    assert reach == [0, 128, 128, 256, 1024, 2048, 7 * 1024]


@pytest.mark.slow
def test_zigzag_gives_every_device_an_early_and_a_late_part():
    place = make_place("ring", (1, 8, 1))
    tokens = jnp.arange(32)[None]
    spec = place.spec(None, "length")
    zigzag = place.shard_map(partial(ring.to_zigzag, axis="length", size=8), (spec,), spec)(tokens)
    parts = zigzag.reshape(8, 2, 2)[:, :, 0] // 2
    assert parts.tolist() == [[i, 15 - i] for i in range(8)]
    assert ring.zigzag_blocks(tokens, 8).reshape(1, 32).tolist() == zigzag.tolist()
    back = place.shard_map(partial(ring.from_zigzag, axis="length", size=8), (spec,), spec)(zigzag)
    assert back.tolist() == tokens.tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [{"strategy": "ring"}, {"strategy": "ring", "window": 50}])
def test_triton_kernels_of_blocks_and_offsets_interpreted(case, monkeypatch):
    """Parts of 64 tokens, the least that the kernels take."""
    options = {"interpret": True}
    block = BlockKernel(*(partial(run, **options) for run in BACKENDS["triton"].block))
    run = partial(triton.attention, **options)
    changes = {"platforms": ("cpu",), "dtypes": ("float32",), "run": run, "block": block}
    monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(BACKENDS["triton"], **changes))
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = {
        name: jax.random.normal(key, (BATCH, 256, heads, 16))
        for name, key, heads in zip("qkv", keys, (2, 1, 1), strict=True)
    }
    arrays["sinks"] = jnp.linspace(-1.0, 2.0, 2)
    segments = np.repeat([[1, 2, 3, 0], [0, 1, 2, 3]], [100, 50, 90, 16], axis=1).astype(np.int32)
    request = make_request(softcap=2.0, window=case.get("window"))
    expected = value_and_grads(arrays, segments, request, backend="reference")
    got = value_and_grads(arrays, segments, request, backend="triton", place=make_place(case["strategy"], (1, 2, 1)))
    assert_equal(got, expected, "triton", tolerance=3.0)
