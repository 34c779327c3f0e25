"""Pipeline stages on simulated devices against one device: losses, gradients, layer outputs, accumulation dtype."""

import json
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.decode.open import build_model
from maxhydra.layers import Context
from maxhydra.model.pipeline import _Weights
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss
from maxhydra.train.state import TrainState, plan_states
from tests.support.cli import SMALL, losses, run_ok
from tests.support.mesh_cases import Case, Trained, compare, initial_state, train

ROWS, LENGTH, STEPS = 8, 16, 3
FIXED = (f"train.seq_len={LENGTH}", "train.z_loss=1e-3", "optimizer.schedule.warmup_steps=0")
FIXED += ("optimizer.clip_norm=null", "model.scan_unroll=1")
LLAMA = ("model=llama3-tiny", "model.num_layers=4", "model.emb_dim=32", "model.mlp_dim=32")
# Prefix, experts, latent attention, router bias and a multi-token prediction layer.
PREFIX = ("model=deepseek3-tiny", "model.num_layers=5")
# Prefix layers that share keys and values with the pattern, and per-layer embeddings.
SHARED = ("model=gemma4-tiny", "model.num_layers=6")


class Run:
    """A model with its optimizer on as many simulated devices as its mesh has."""

    def __init__(self, *overrides: str, **axes: int):
        devices = math.prod(axes.values())
        mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **axes}.items()]
        batch = f"train.per_device_batch_size={ROWS / devices}"
        fixed = [batch, f"train.seq_len={LENGTH}", "train.z_loss=1e-3", "optimizer.schedule.warmup_steps=0"]
        self.config = compose([*overrides, *fixed, *mesh]).config
        self.sharder = Sharder.from_config(self.config.mesh, build_mesh(self.config.mesh, jax.devices()[:devices]))
        self.states = plan_states(self.config, self.sharder)
        self.loss = next_token_loss(self.states.model, self.sharder, self.config.train)

    def batch(self, seed: int) -> dict[str, jax.Array]:
        """Rows of two documents; every third row ends with padding."""
        tokens = np.random.default_rng(seed).integers(0, 300, (ROWS, LENGTH)).astype(np.int32)
        segments = np.where(np.arange(LENGTH) < LENGTH // 2, 1, 2) * np.ones((ROWS, 1), np.int32)
        segments[::3, -4:] = 0
        positions = np.where(segments == 0, 0, np.arange(LENGTH) % (LENGTH // 2))
        arrays = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "positions": positions}
        arrays |= {"segments": segments, "weights": (segments > 0).astype(np.float32)}
        sharding = self.sharder.sharding(("act_batch", "act_length"))
        return {
            name: jax.device_put(x if x.dtype == np.float32 else x.astype(np.int32), sharding)
            for name, x in arrays.items()
        }


def case_of(overrides: tuple[str, ...], devices: int) -> Case:
    return Case([*overrides, *FIXED], devices=devices, rows=ROWS, length=LENGTH, steps=STEPS)


@cache
def initial(overrides: tuple[str, ...]) -> TrainState:
    return initial_state(case_of(overrides, 1))


@cache
def one_device(overrides: tuple[str, ...]) -> Trained:
    return train(case_of(overrides, 1), initial(overrides))


# scripts/mesh_matrix.py compares every family on more meshes.
CASES = [
    pytest.param(LLAMA, {"stage": 4}, (), marks=pytest.mark.exhaustive),
    (LLAMA, {"stage": 2, "fsdp": 2, "tensor": 2}, ("mesh.pipeline.repeats=2",)),
    pytest.param(
        *(PREFIX, {"stage": 2, "expert": 2, "data": 2}, ("mesh.pipeline.repeats=2",)), marks=pytest.mark.exhaustive
    ),
    pytest.param(SHARED, {"stage": 2, "fsdp": 2}, (), marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "axes", "change"), CASES, ids=str)
def test_stages_change_neither_losses_nor_gradients(model, axes, change):
    mesh = tuple(f"mesh.{axis}={size}" for axis, size in axes.items())
    case = case_of((*model, *change, *mesh), math.prod(axes.values()))
    # One case also initializes its weights over stages.
    trained = train(case, None if axes == {"stage": 4} else initial(model))
    errors = compare(one_device(model), trained)
    assert errors.loss_error < 1e-5 and errors.gradient_error < 1e-4, errors


@pytest.mark.slow
def test_program_has_the_steps_of_the_schedule_and_each_stage_its_layers():
    run = Run(*LLAMA, "mesh.pipeline.repeats=2", stage=2)
    params, batch = run.states.abstract().params, run.batch(0)
    program = str(jax.make_jaxpr(lambda params, batch: run.loss(params, batch, None)["loss"])(params, batch))
    schedule = run.sharder.pipeline_schedule(ROWS)
    assert (schedule.microbatches, schedule.ticks) == (4, 9)
    assert f"length={schedule.ticks}" in program
    spec = run.states.shardings().params["pattern"]["0"]["attention"]["query"]["kernel"].spec
    assert spec[0] == "stage"
    assert "stage" in jax.tree.leaves(tuple(run.states.shardings().params["embedding"]["table"].spec))


@pytest.mark.exhaustive
def test_layer_outputs_of_the_pipeline_equal_those_of_one_device():
    def layers(run: Run) -> np.ndarray:
        batch, model = run.batch(0), run.states.model
        ctx = Context.of_batch(batch, run.sharder, None)
        function = jax.jit(lambda params: model.features(params, batch["tokens"], ctx, range(4))[1])
        return np.stack(function(run.states.create(0).params))

    small = (*LLAMA, "model.scan_unroll=1")
    np.testing.assert_allclose(layers(Run(*small, "mesh.pipeline.repeats=2", stage=2)), layers(Run(*small)), atol=2e-5)


def test_gradients_are_summed_over_microbatches_in_the_dtype_of_the_weights():
    """In bfloat16, 1 + 1/512 is 1, however often it is added."""
    terms = jnp.asarray([1.0, *[1 / 512] * 512], jnp.bfloat16)
    weight = nnx.State({"kernel": nnx.Param(jnp.ones((2, 2), jnp.bfloat16), axes=(None, None))})

    def total(weight):
        weights = _Weights.of(weight, Sharder.single(), jnp.dtype(jnp.float32))

        def add(sum, term):
            return sum + jnp.sum((weights.joined()["kernel"][...] * term).astype(jnp.float32)), None

        return jax.lax.scan(add, 0.0, terms)[0]

    found = jax.jit(jax.grad(total))(weight)["kernel"][...]
    np.testing.assert_array_equal(found, np.full((2, 2), 2.0))


def test_layers_that_do_not_divide_into_stages_are_rejected():
    with pytest.raises(ConfigError, match=r"mesh\.stage(.|\n)*4 repetitions(.|\n)*1, 2, 4"):
        Run(*LLAMA, "mesh.pipeline.repeats=4", stage=2)
    with pytest.raises(ConfigError, match=r"mesh\.pipeline\.repeats(.|\n)*mesh\.stage=1"):
        Run(*LLAMA, "mesh.pipeline.repeats=2", fsdp=2)


@pytest.mark.exhaustive
def test_a_run_over_stages_equals_one_device_and_resumes_without_stages(tmp_path):
    """Loader, gradient accumulation, evaluation, checkpoint and the final sample, as a user runs them."""
    fixed = [*SMALL, "train.steps=4", "checkpoint.every=4", "train.eval_every=4", "train.eval_batches=1"]
    fixed += [
        "train.grad_accum=2",
        "train.sample.tokens=8",
        "train.sample.temperature=0",
        "optimizer/schedule=constant",
    ]
    run_ok(*fixed, "run.name=one", "train.per_device_batch_size=8", cwd=tmp_path)
    stages = ["mesh.stage=2", "mesh.fsdp=1", "train.per_device_batch_size=4"]
    run_ok(*fixed, *stages, "run.name=two", cwd=tmp_path, devices=2)
    outputs = tmp_path / "outputs"
    one, two = losses(outputs / "one"), losses(outputs / "two")
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-5)
    samples = [json.loads((outputs / name / "run.json").read_text())["sample"] for name in ("one", "two")]
    assert samples[0] == samples[1]
    fewer = [*fixed, "train.steps=6"]
    run_ok(*fewer, "run.name=one", "train.per_device_batch_size=8", cwd=tmp_path)
    run_ok(*fewer, "run.name=two", "mesh.fsdp=2", "train.per_device_batch_size=4", cwd=tmp_path, devices=2)
    one, two = losses(outputs / "one"), losses(outputs / "two")
    assert list(one) == list(two) == list(range(1, 7))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-5)


def test_decoding_rejects_stages():
    config = compose([*LLAMA, "mesh.stage=2", "mesh.fsdp=4"]).config
    with pytest.raises(ConfigError, match=r"mesh\.stage(.|\n)*for training"):
        build_model(config)
