"""Expert parallelism on eight simulated devices, against one device and against a NumPy transcription of the drops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import AXES, RULES, Mesh
from maxhydra.layers import Context, router
from maxhydra.layers import expert_parallel as subject
from maxhydra.layers.context import KernelChoice
from maxhydra.layers.expert_mlp import Weights
from maxhydra.layers.expert_rows import RoutedTokens
from maxhydra.measure import hlo
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.sharding.mesh import AXIS_TYPES
from maxhydra.train.loss import layer_metrics
from tests.support.mixtures import EMB, HIDDEN, Mixture, expert, softmax_top_k

AUTO, SEND, GATHER = config.Dispatch
BATCH, LENGTH = 8, 32


def sharder_of(axes, **rules):
    return Sharder(build_mesh(Mesh(**axes), jax.devices()), Mesh().rules | rules)


def inputs(mixture, *, favourite=None):
    """Tokens; with a `favourite` expert, all of them choose it and those after it."""
    x, weights = mixture.inputs(BATCH, LENGTH), mixture.weights
    if favourite is not None:
        order = np.roll(np.arange(mixture.moe.experts), favourite)
        kernel = np.zeros_like(weights["router"]["kernel"])
        kernel[0, order] = -np.arange(len(order)) / 4
        x, weights = x.at[..., 0].set(1.0), {**weights, "router": {**weights["router"], "kernel": jnp.asarray(kernel)}}
    return weights, x


def value_and_gradients(function, weights, x, is_real=None):
    """Outputs of the real tokens, and the gradients of a random projection of them by weights and tokens.

    A function that also returns the number of dropped rows has it as the third result.
    """
    towards = np.random.default_rng(0).normal(size=x.shape)
    towards = towards if is_real is None else towards * is_real[..., None]

    def projected(weights, x):
        out, *dropped = jax.tree.leaves(function(weights, x))
        return jnp.sum(out * towards), (jnp.where(towards != 0, out, 0), *dropped)

    (_, (out, *dropped)), gradients = jax.jit(jax.value_and_grad(projected, (0, 1), has_aux=True))(weights, x)
    return out, gradients, *dropped


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found[1], expected[1])


PLAIN = config.Moe(experts=16, top_k=2)
SHARED = config.Shared(dim=8, gate=config.Gate.sigmoid)
BIASED = config.Moe(experts=8, top_k=3, bias=True, clamp=2.0, shared=SHARED)
SCALED = config.Moe(
    experts=8, top_k=2, router=config.Router(scaled=config.Scaled.input, scores=config.RouterScores.sigmoid)
)
CASES = {
    "expert": (PLAIN, {"expert": 8}, {}),
    "expert_fsdp_tensor": (BIASED, {"expert": 2, "fsdp": 2, "tensor": 2}, {}),
    "expert_sequence": (SCALED, {"expert": 4, "sequence": 2}, {}),
    "experts_over_expert_and_sequence": (PLAIN, {"expert": 4, "sequence": 2}, {"experts": ["sequence", "expert"]}),
    "experts_over_tensor_too": (BIASED, {"expert": 4, "tensor": 2}, {"experts": ["tensor", "expert"]}),
}


@functools.cache
def one_device(case):
    mixture = Mixture(CASES[case][0])
    return value_and_gradients(lambda w, x: mixture(w, x).out_BTD, *inputs(mixture))


@pytest.mark.slow
@pytest.mark.default_cases(
    "expert_fsdp_tensor-all_gather",
    "expert_sequence-all_to_all",
)
@pytest.mark.parametrize("dispatch", [SEND, GATHER], ids=lambda dispatch: dispatch.value)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_those_of_one_device(case, dispatch):
    moe, axes, rules = CASES[case]
    mixture, sharder = Mixture(moe, dispatch=dispatch), sharder_of(axes, **rules)
    found = value_and_gradients(lambda w, x: mixture(w, x, sharder=sharder).out_BTD, *inputs(mixture))
    assert_same(found, one_device(case))


@pytest.mark.slow
def test_the_shared_expert_is_summed_with_the_others():
    """One reduce-scatter of the output; all-reduced arrays (load, mask) are smaller."""
    mixture, sharder = Mixture(BIASED), sharder_of({"fsdp": 4, "tensor": 2})
    run = jax.jit(lambda weights, x: mixture(weights, x, sharder=sharder).out_BTD)
    moved = hlo.collectives(hlo.parse_program(run.lower(*inputs(mixture)).compile().as_text()))
    large = [one.kind for one in moved if one.bytes >= BATCH * LENGTH * EMB and one.kind != "all-gather"]
    assert large == ["reduce-scatter"]


@pytest.mark.slow
def test_every_device_sorts_the_scores_of_its_own_tokens(monkeypatch):
    monkeypatch.setattr(router, "MOST_PAIRS", 0)
    mixture, sharder = Mixture(PLAIN), sharder_of({"fsdp": 8})
    run = jax.jit(lambda weights, x: mixture(weights, x, sharder=sharder).out_BTD)
    x = jax.device_put(mixture.inputs(BATCH, LENGTH), sharder.sharding(("act_batch", None, None)))
    moved = hlo.collectives(hlo.parse_program(run.lower(mixture.weights, x).compile().as_text()))
    assert [one for one in moved if one.kind != "all-reduce"] == []


def accepted_rows(chosen, devices, capacity):
    """Transcription of the drops: [B, T, E] which choices are sent, for tokens [B, T, E] split over B.

    A queue holds the rows that a device sends to an expert, in the order of its tokens. The queues to a device grow
    together, row by row, until its capacity is full; in the last round the first queues take the free rows.
    """
    E = chosen.shape[-1]
    queues = chosen.reshape(devices, -1, E)
    accepted = np.zeros_like(queues)
    for receiver in np.split(np.arange(E), devices):
        free, depth = capacity, 0
        while free > 0 and depth < queues.shape[1]:
            for device in range(devices):
                for index in receiver:
                    waiting = np.flatnonzero(queues[device, :, index])
                    if depth < len(waiting) and free > 0:
                        accepted[device, waiting[depth], index], free = True, free - 1
            depth += 1
    return accepted.reshape(chosen.shape)


@pytest.mark.slow
@pytest.mark.default_cases("random-all_gather", "few_experts-all_to_all")
@pytest.mark.parametrize("dispatch", [SEND, GATHER], ids=lambda dispatch: dispatch.value)
@pytest.mark.parametrize("favourite", [None, 3], ids=["random", "few_experts"])
def test_full_buffers_drop_the_end_of_the_longest_queues(favourite, dispatch):
    """The second half of the last sequence is padding, which takes no capacity. Dropped rows have no gradient."""
    mixture = Mixture(dataclasses.replace(PLAIN, top_k=4), dispatch=dispatch, buffer=1.0)
    weights, x = inputs(mixture, favourite=favourite)
    is_real = np.ones((BATCH, LENGTH), bool)
    is_real[-1, LENGTH // 2 :] = False
    capacity = LENGTH * 4
    chosen = (np.array(softmax_top_k(weights, x, 4)) > 0) & is_real[..., None]
    accepted = accepted_rows(chosen, 8, capacity)
    assert np.sum(chosen) - np.sum(accepted) > 0
    segments = jnp.asarray(is_real, jnp.int32)

    def by_hand(weights, x):
        shares = jnp.where(accepted, softmax_top_k(weights, x, 4), 0)
        return sum(shares[..., index, None] * expert(weights, index, x) for index in range(16))

    def run(weights, x):
        out = mixture(weights, x, segments=segments, sharder=sharder_of({"expert": 8}))
        return out.out_BTD, out.aux["dropped"]

    found = value_and_gradients(run, weights, x, is_real)
    assert_same(found, value_and_gradients(by_hand, weights, x, is_real))
    assert found[2] == np.sum(chosen) - np.sum(accepted)


def test_dropped_rows_of_all_layers_are_a_metric():
    layers = {"pattern": {"0": {"mlp": {"load": jnp.ones((2, 4)), "dropped": jnp.array([3.0, 4.0])}}}}
    assert layer_metrics({**layers, "prefix": {"0": {"mlp": {"dropped": jnp.array(5.0)}}}})["moe/dropped"] == 12
    assert "moe/dropped" not in layer_metrics({"pattern": {"0": {"mlp": {"load": jnp.ones((2, 4))}}}})


@pytest.mark.slow
def test_without_a_limit_one_expert_gets_all_tokens():
    mixture = Mixture(PLAIN, dispatch=SEND, buffer=None)
    weights, x = inputs(mixture, favourite=5)
    sharder = sharder_of({"expert": 8})
    found = value_and_gradients(lambda w, x: mixture(w, x, sharder=sharder).out_BTD, weights, x)
    assert_same(found, value_and_gradients(lambda w, x: mixture(w, x).out_BTD, weights, x))
    assert "dropped" not in jax.eval_shape(lambda w, x: mixture(w, x, sharder=sharder), weights, x).aux


@pytest.mark.slow
@pytest.mark.default_cases("all_to_all")
@pytest.mark.parametrize("dispatch", [SEND, GATHER], ids=lambda dispatch: dispatch.value)
def test_chunks_do_not_change_the_result(dispatch):
    mixture = Mixture(PLAIN, dispatch=dispatch, chunks=2)
    sharder = sharder_of({"expert": 4, "fsdp": 2})
    found = value_and_gradients(lambda w, x: mixture(w, x, sharder=sharder).out_BTD, *inputs(mixture))
    assert_same(found, one_device("expert"))


@pytest.mark.slow
@pytest.mark.default_cases("8-8-True", "8-6-False")
@pytest.mark.parametrize(("devices", "top_k", "gathers"), [(2, 8, True), (8, 8, True), (8, 6, False), (64, 8, False)])
def test_auto_gathers_only_if_that_sends_no_more_rows(devices, top_k, gathers):
    """Rows sent per token: devices - 1 by all-gather, top_k * (devices - 1) / devices by all-to-all."""
    programs = {dispatch: collectives(dispatch, devices=devices, top_k=top_k) for dispatch in (AUTO, SEND, GATHER)}
    assert programs[AUTO] == programs[GATHER if gathers else SEND]
    assert programs[SEND] != programs[GATHER]


def local_equations(dispatch, *, devices, top_k=4, buffer=2.0, tokens=256):
    """The equations that each GPU executes in the experts and their gradient, for so many tokens per device."""
    experts = Mixture(config.Moe(experts=128, top_k=top_k), dispatch=dispatch, buffer=buffer).spec.experts
    spec = dataclasses.replace(experts, compute=jnp.dtype("bfloat16"), kernel=KernelChoice("xla", ()))
    device = AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = AbstractMesh(
        tuple(devices if axis == "expert" else 1 for axis in AXES), AXES, axis_types=AXIS_TYPES, abstract_device=device
    )
    sharder, positions = Sharder(mesh, RULES), jnp.zeros((devices, tokens))
    ctx = Context(positions=positions, segments=None, sharder=sharder, cache=None, dropout_key=None)
    D, F, E, pairs = spec.emb_dim, spec.dim, spec.experts, (devices, tokens, top_k)

    def summed(weights, x, shares):
        routed = RoutedTokens(x, jnp.zeros(pairs, int), shares)
        mesh = subject.ExpertMesh.of(spec, ctx)
        return jnp.sum(subject.expert_parallel(weights, routed, positions == 0, mesh, ctx, shared=None)[0])

    shapes = [(E, D, F), (E, D, F), (E, F, D)]
    weights = Weights(*(jnp.zeros(shape, spec.compute) for shape in shapes), None, None)
    x = jnp.zeros((devices, tokens, D), spec.compute)
    jaxpr = jax.make_jaxpr(jax.grad(summed, (0, 1, 2)))(weights, x, jnp.zeros(pairs))
    return [equation for inner in inner_jaxprs(jaxpr.jaxpr, inside=False) for equation in inner.eqns]


def inner_jaxprs(jaxpr, *, inside):
    """The programs inside shard_map."""
    if inside:
        yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from inner_jaxprs(inner, inside=inside or equation.primitive.name == "shard_map")


def collectives(dispatch, **sizes):
    """(primitive, dtype, shape) of every collective that a GPU executes, except the sum of its weights' gradients."""
    names = ("all_gather", "all_to_all", "ragged_all_to_all", "reduce_scatter")
    equations = [one for one in local_equations(dispatch, **sizes) if one.primitive.name in names]
    operands = [(one.primitive.name, one.invars[0].aval) for one in equations]
    return sorted((name, str(aval.dtype), aval.shape) for name, aval in operands)


def test_all_to_all_sends_bfloat16_both_ways_and_gathers_only_loads():
    """Forward there and back, and the gradients of both; backward the router's weights too, and their gradients."""
    name, rows, capacity = "ragged_all_to_all", 256 * 4, 2 * 256 * 4
    there, back = (name, "bfloat16", (rows, EMB)), (name, "bfloat16", (capacity, EMB))
    loads, weights = ("all_gather", "int32", (128,)), [(name, "float32", (size, 1)) for size in (rows, capacity)]
    assert collectives(SEND, devices=64) == [loads, there, there, back, back, *weights]


def test_all_gather_sends_tokens_in_bfloat16():
    sent = [one for one in collectives(GATHER, devices=8) if one[2][-1] == EMB]
    gathered, summed = ("all_gather", "bfloat16", (256, EMB)), ("reduce_scatter", "bfloat16", (8 * 256, EMB))
    assert sent == [gathered, gathered, summed, summed]


@pytest.mark.slow
def test_arrays_of_a_device_do_not_grow_with_the_number_of_devices():
    """Only the loads do, devices * experts integers."""

    def largest(devices, buffer):
        equations = local_equations(SEND, devices=devices, buffer=buffer)
        shapes = [variable.aval.shape for one in equations for variable in one.outvars]
        return max(shape[0] for shape in shapes if shape and shape[-1] in (EMB, HIDDEN))

    assert largest(8, 2.0) == largest(64, 2.0) == 2 * 256 * 4
    assert largest(64, None) == 64 * 256 * 2
