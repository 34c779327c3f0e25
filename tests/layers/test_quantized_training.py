"""Training in int8 and in float8 with delayed scaling against Qwix and NumPy; quantization-aware training."""

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.quantization import Activations, Quantization, QuantizationKind, QuantizationRule
from maxhydra.config.schema.run import Train
from maxhydra.data.sources import demo
from maxhydra.kernels.fp8_matmul import fp8_matmul_delayed
from maxhydra.kernels.int8_matmul import int8_matmul
from maxhydra.kernels.matmul import Layout
from maxhydra.layers import Context
from maxhydra.layers.linear import Linear, MatmulSpec
from maxhydra.layers.quant.training import QuantRule, rounding, straight_through
from maxhydra.model import build, map_leaves, store_weight
from maxhydra.optim import Optimizer
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss, plan_states
from maxhydra.train.checkpoint import open_checkpointer, restore
from maxhydra.train.state import Guard, StateFactory, TrainState
from maxhydra.train.step import make_step
from tests.kernels.test_fp8_matmul import sample
from tests.support.skips import import_optional

SINGLE = Sharder.single()


@pytest.mark.slow
@pytest.mark.parametrize("is_wide_back", [False, True])
def test_int8_matmul_and_its_gradients_equal_qwix(is_wide_back: bool) -> None:
    qt = import_optional("qwix._src.core.dot_general_qt", extra="parity")
    shapes = [(6, 32), (32, 16), (6, 16)]
    x, weight, d_out = (jnp.asarray(sample(*shape, seed=i, size=1.0)) for i, shape in enumerate(shapes))
    # Theirs goes half a step beyond the largest code, unless told otherwise.
    way, back = f"absmax,{127.5 / 127}", None if is_wide_back else jnp.int8
    qwix_config = qt.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=jnp.int8,
        lhs_calibration_method=way,
        rhs_calibration_method=way,
        dlhs_grad_qtype=back,
        drhs_grad_qtype=back,
        dlhs_grad_calibration_method=way,
        drhs_grad_calibration_method=way,
        disable_gradient_clipping=True,
    )
    matmul = partial(qt.dot_general_qt, dimension_numbers=(((1,), (0,)), ((), ())), config=qwix_config)
    expected, pull_back = jax.vjp(matmul, x, weight)
    out, own_pull_back = jax.vjp(partial(int8_matmul, is_wide_back), x, weight)
    for found, other in zip((out, *own_pull_back(d_out)), (expected, *pull_back(d_out)), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)
    exact = np.asarray(x) @ np.asarray(weight)
    assert 1e-4 < np.abs(out - exact).max() / np.abs(exact).max() < 0.02


@pytest.mark.slow
@pytest.mark.default_cases("QuantizationKind.qat_int4-int4")
@pytest.mark.parametrize(
    ("kind", "bits"), [(QuantizationKind.qat_int8, jnp.int8), (QuantizationKind.qat_int4, jnp.int4)]
)
def test_fake_quantized_activations_equal_qwix(kind: QuantizationKind, bits: Any) -> None:
    """Values and straight-through gradients of a projection with one scale per token."""
    qt = import_optional("qwix._src.core.dot_general_qt", extra="parity")
    x, kernel, d_out = (
        jnp.asarray(sample(*shape, seed=i, size=1.0)) for i, shape in enumerate([(3, 2, 32), (32, 16), (3, 2, 16)])
    )
    largest = 127 if bits == jnp.int8 else 7
    qwix_config = qt.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=bits,
        lhs_calibration_method=f"absmax,{127.5 / 127}",
        rhs_calibration_method=f"absmax,{(largest + 0.5) / largest}",
        disable_gradient_clipping=True,
    )
    matmul = partial(qt.dot_general_qt, dimension_numbers=(((2,), (0,)), ((), ())), config=qwix_config)
    expected, pull_back = jax.vjp(matmul, x, kernel)

    rule = QuantizationRule(kind=kind, targets=["up"], activations=Activations.int8)
    spec = MatmulSpec(np.dtype(np.float32), Layout.plain, formats=(QuantRule.of(rule),))
    context = Context(positions=jnp.zeros((3, 2)), segments=None, sharder=SINGLE, cache=None, dropout_key=None)

    def projected(x: jax.Array, kernel: jax.Array) -> jax.Array:
        own = Linear(nnx.Param(kernel), None, spec, name="up", inputs=1, bias=None, history=None)
        return own(x, context)

    out, own_pull_back = jax.vjp(projected, x, kernel)
    for found, other in zip((out, *own_pull_back(d_out)), (expected, *pull_back(d_out)), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)
    weights_alone = np.asarray(x) @ np.asarray(
        straight_through(rounding(QuantRule.of(rule), inputs=1, name="up"), kernel)
    )
    assert 1e-4 < np.abs(out - weights_alone).max() / np.abs(weights_alone).max() < 0.02


def test_experts_reject_quantized_activations() -> None:
    moe = config.Kind(feed_forward=config.FeedForward.moe, moe=config.Moe(experts=4, dim=32))
    rounds = Quantization(kind=QuantizationKind.qat_int8, targets=LAYERS, activations=Activations.int8)
    message = r"quantization\.activations=int8: layer/mlp/experts/gate is a projection of experts"
    with pytest.raises(ConfigError, match=message):
        _ = model(rounds, moe).shapes
    overrides = {"experts": QuantizationRule(kind=QuantizationKind.qat_int8, targets=["experts/"])}
    assert model(dataclasses.replace(rounds, overrides=overrides), moe).shapes


def narrowed(x: np.ndarray, dtype: Any, before: np.ndarray) -> np.ndarray:
    """Quantize x to float8 with the power-of-two scale of an earlier amax; larger values are clipped."""
    most = float(ml_dtypes.finfo(dtype).max)
    scale = 1.0 if before.max() == 0 else 2.0 ** np.ceil(np.log2(before.max() / most))
    return np.clip(x / scale, -most, most).astype(dtype).astype(np.float64) * scale


@pytest.mark.slow
@pytest.mark.parametrize("before", [0.0, 0.5, 8.0])
def test_delayed_scaling_uses_the_amax_history_and_updates_it(before: float) -> None:
    x, weight, d_out = (
        sample(6, 32, seed=0, size=1.0),
        sample(32, 16, seed=1, size=0.1),
        sample(6, 16, seed=2, size=0.1),
    )
    seen = np.array([np.abs(array).max() for array in (x, weight, d_out)])
    history = np.zeros((3, 4), np.float32)
    history[:, 2], history[:, 1] = before * seen, before * seen / 3
    out, pull_back = jax.vjp(partial(fp8_matmul_delayed, True), *map(jnp.asarray, (x, weight, history)))
    d_x, d_weight, told = pull_back(jnp.asarray(d_out))

    narrow_x, narrow_weight = (
        narrowed(array, ml_dtypes.float8_e4m3fn, row) for array, row in ((x, history[0]), (weight, history[1]))
    )
    narrow_d = narrowed(d_out, ml_dtypes.float8_e5m2, history[2])
    for found, expected in (
        (out, narrow_x @ narrow_weight),
        (d_x, narrow_d @ narrow_weight.T),
        (d_weight, narrow_x.T @ narrow_d),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(told[:, 0], seen, rtol=1e-6)
    assert not np.any(told[:, 1:])


@pytest.mark.exhaustive
def test_a_run_with_an_amax_history_resumes_bit_identically(tmp_path: Path) -> None:
    """Bit-identical on the same device; close on four devices, which split the heads."""
    sizes = ["model.num_layers=2", "model.emb_dim=32", "model.mlp_dim=48", "model.num_heads=2", "model.head_dim=16"]
    sizes += ["train.seq_len=32"]
    requested = ["quantization=fp8_delayed", "quantization.history=3", "train.grad_accum=2"]
    alone, split = ([*sizes, *requested, *mesh] for mesh in ([], ["mesh.fsdp=2", "mesh.tensor=2"]))
    states, step, config = started(alone, devices=1)
    batches = text(2, config.train.seq_len)
    first, _ = step(states.create(0), {name: array[0] for name, array in batches.items()})
    assert {leaf.shape for leaf in jax.tree.leaves(first.history)} == {(2, 3, 3)}
    saver = open_checkpointer(tmp_path, config.checkpoint)
    saver.save(1, first, {}, {})
    saver.close()

    def second(states: StateFactory, step: Any) -> tuple[TrainState, float]:
        found = restore(tmp_path, config.checkpoint, states.abstract(), lambda position: None)
        assert found is not None
        state, metrics = step(found.state, {name: array[1] for name, array in batches.items()})
        return state, float(metrics["loss"])

    expected, metrics = step(first, {name: array[1] for name, array in batches.items()})
    jax.tree.map(np.testing.assert_array_equal, second(states, step)[0], expected)
    up = "pattern", "0", "mlp", "up"
    history, kernel = np.asarray(at(expected.history, *up, "history")), at(first.params, *up, "kernel")
    np.testing.assert_allclose(history[:, 1, 0], np.abs(kernel).max((1, 2)), rtol=1e-6)
    np.testing.assert_array_equal(history[..., 1:], at(first.history, *up, "history")[..., :-1])
    assert (history[:, :, :2] > 0).all() and not np.any(history[:, :, 2])

    over_four, loss = second(*started(split, devices=4)[:2])
    np.testing.assert_allclose(at(over_four.history, *up, "history"), history, rtol=1e-3)
    np.testing.assert_allclose(loss, float(metrics["loss"]), rtol=1e-3)


def started(overrides: list[str], *, devices: int) -> tuple[StateFactory, Any, Config]:
    config = compose(overrides).config
    states = plan_states(config, Sharder(build_mesh(config.mesh, jax.devices()[:devices]), config.mesh.rules))
    loss = next_token_loss(states.model, states.sharder, config.train)
    step = make_step(loss, states.optimizer, config.train, states.model.apply_aux_updates)
    return states, jax.jit(step), config


def at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def text(steps: int, length: int, rows: int = 8, first: int = 0) -> dict[str, np.ndarray]:
    """Batches [steps, rows, length] of the plays that ship with the package, as bytes."""
    words = np.frombuffer(Path(demo.TEXT).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(first).integers(0, len(words) - length - 1, (steps, rows, 1))
    tokens = words[starts + np.arange(length + 1)]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (steps, rows, length))
    weights = np.ones(positions.shape, np.float32)
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "positions": positions, "weights": weights}


def model(quantization: Quantization, kind: config.Kind | None = None) -> Any:
    sizes = {"num_layers": 2, "emb_dim": 32, "mlp_dim": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    fields = {**sizes, "vocab_size": 256, "context_length": 64, "kinds": {"layer": kind or config.Kind()}}
    return build(config.Model(**fields, dtypes=config.Dtypes(compute=config.Dtype.float32)), None, quantization)


LAYERS = ["attention/", "mlp/"]
STEPS = 60
OPTIMIZER = Optimizer(transform=optax.adam(5e-3), schedule=lambda step: 5e-3)


@cache
def program(kind: QuantizationKind) -> Any:
    """Steps over batches of text."""
    train = Train(z_loss=0.0, loss_chunk=0)
    own = model(Quantization(kind=kind, targets=LAYERS if kind is not QuantizationKind.none else []))
    step = make_step(next_token_loss(own, SINGLE, train), OPTIMIZER, train, own.apply_aux_updates)
    return jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))


def trained(kind: QuantizationKind, params: Any, first: int) -> tuple[Any, float]:
    """Weights after STEPS steps, and the mean loss of the last 20."""
    key = jax.random.key_data(jax.random.key(1))
    moments = jax.jit(OPTIMIZER.transform.init)(params)
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, moments, key, Guard.fresh())
    state, metrics = program(kind)(state, text(STEPS, 32, first=first))
    return state.params, float(np.mean(metrics["loss"][-20:]))


def with_outliers(params: Any) -> Any:
    """The same function, with large weights for a few input channels and correspondingly small norm scales."""
    layer = params["pattern"]["0"]
    large = jnp.ones(32).at[:3].set(20.0)
    names = {"attention": ("query", "key", "value"), "mlp": ("gate", "up")}
    for part, projections in names.items():
        scale = layer[f"{part}_norm"]["scale"] / large
        wide = {
            name: {"kernel": jnp.einsum("LD...,D->LD...", layer[part][name]["kernel"], large)} for name in projections
        }
        layer = {**layer, f"{part}_norm": {"scale": scale}, part: {**layer[part], **wide}}
    return {**params, "pattern": {"0": layer}}


def held_out(own: Any, params: Any) -> float:
    batch = {name: array[0] for name, array in text(1, 32, rows=64, first=9).items()}
    sums = jax.jit(next_token_loss(own, SINGLE, Train(z_loss=0.0, loss_chunk=0)))(params, batch, None)
    return float(sums["loss"] / sums["weight"])


@pytest.mark.exhaustive
def test_int8_training_converges_and_qat_reduces_the_int4_loss() -> None:
    """On real text, int8 ends within 2 % of float32, and int4 costs less after quantization-aware training."""
    kinds = QuantizationKind
    start = jax.jit(model(Quantization()).init)(jax.random.key(0))
    plain, in_int8 = ([start, 0.0] for _ in range(2))
    for first in (0, 1):
        plain, in_int8 = trained(kinds.none, plain[0], first), trained(kinds.int8, in_int8[0], first)
    assert plain[1] < 3 and abs(in_int8[1] / plain[1] - 1) < 0.02, (plain[1], in_int8[1])

    packed = model(Quantization(kind=kinds.int4_weights, targets=LAYERS))
    ends = [trained(kind, jax.jit(with_outliers)(plain[0]), 2)[0] for kind in (kinds.none, kinds.qat_int4)]
    pack = jax.jit(lambda params: map_leaves(params, partial(store_weight, packed)))
    rounded, trained_for = (held_out(packed, pack(params)) for params in ends)
    assert trained_for < rounded - 0.05, (trained_for, rounded)
