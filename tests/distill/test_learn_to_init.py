"""Learned initialization: maps of attention weights against loops over their definition, and their training."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.hardware import Mesh
from maxhydra.config.schema.tasks.distill import DistillTask, LearnToInit, WeightMap
from maxhydra.distill.learn_to_init import apply_maps, initial_maps, learn_init
from maxhydra.distill.loss import StudentTeacher, distillation_loss
from maxhydra.distill.teacher import OnlineTeacher
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder, build_mesh
from tests.support.cli import SMALL, facts, run_ok

MESH = Mesh(fsdp=1)  # type: ignore[call-arg]
SINGLE = Sharder(build_mesh(MESH, jax.devices()[:1]), MESH.rules)
TEACHER_SIZES = ["model=micro", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8", "model.emb_dim=32"]
TASK = ["task=distill", "task.teacher.weights=x"]


def model_of(*overrides: str) -> ModelDef:
    return build(compose([*TEACHER_SIZES, "model.kinds.layer.attention.bias=qkv", *overrides]).config.model)


def random_params(model: ModelDef) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), model.shapes)


@pytest.mark.slow
@pytest.mark.default_cases("bilinear")
@pytest.mark.parametrize("kind", [WeightMap.bilinear, WeightMap.linear], ids=lambda kind: kind.value)
def test_mapped_projections_equal_loops_over_their_definition(kind: WeightMap) -> None:
    teacher, student = model_of(), model_of("model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=16")
    weights = random_params(teacher)
    maps = initial_maps(teacher.shapes, kind, target=student.shapes, key=jax.random.key(0))
    rng = np.random.default_rng(1)
    maps = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), maps)
    mapped = apply_maps(maps, weights)
    assert jax.tree.map(jnp.shape, mapped) == jax.tree.map(lambda x: x.shape, student.shapes)
    for name in ("query", "value", "out"):
        matrices = {key: np.asarray(value) for key, value in maps["pattern", "0", "attention", name].items()}
        kernel = np.asarray(weights["pattern"]["0"]["attention"][name]["kernel"])
        # Input dimension last, so that all projections read alike.
        kernel = kernel if name == "out" else np.moveaxis(kernel, 1, -1)
        (L, X, Y, D), (U, V) = kernel.shape, (1 if name == "value" else 2, 16)
        expected = np.zeros((L, U, V, D))
        for layer, x, y, u, v in np.ndindex(L, X, Y, U, V):
            factor = (
                matrices["heads"][layer, x, u] * matrices["dims"][layer, y, v]
                if kind is WeightMap.bilinear
                else matrices["map"][layer, x, y, u, v]
            )
            expected[layer, u, v] += factor * kernel[layer, x, y]
        found = np.asarray(mapped["pattern"]["0"]["attention"][name]["kernel"])
        found = found if name == "out" else np.moveaxis(found, 1, -1)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_equal_heads_start_as_the_teacher() -> None:
    teacher = model_of()
    weights = random_params(teacher)
    for kind in (WeightMap.bilinear, WeightMap.linear):
        maps = initial_maps(teacher.shapes, kind, target=teacher.shapes, key=jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, apply_maps(maps, weights), weights)


@pytest.mark.exhaustive
def test_learned_maps_lower_the_divergence() -> None:
    """A bias is mapped with its projection, so that the mapped student is a linear map of the teacher's heads."""
    teacher, student = model_of(), model_of("model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=16")
    weights, task = random_params(teacher), compose([*TASK, "task.init_layers=[0,1]"]).config.task
    assert isinstance(task, DistillTask)
    settings = LearnToInit(map=WeightMap.bilinear, steps=30, learning_rate=0.02)
    loss = distillation_loss(StudentTeacher(student, SINGLE, OnlineTeacher(teacher, SINGLE), task.features, 0), task)
    rows, length = 4, 16
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 256, (rows, length)), jnp.int32)
    batch = {"tokens": ids, "targets": ids, "weights": jnp.ones(ids.shape)}
    batch |= {
        "positions": jnp.tile(jnp.arange(length), (rows, 1)),
        "alpha": jnp.ones(rows),
        "temperature": jnp.ones(rows),
    }

    def divergence(steps: int) -> float:
        found = learn_init(
            student,
            teacher,
            weights,
            [0, 1],
            dataclasses.replace(settings, steps=steps),
            loss=loss,
            batches=[batch] * steps,
            sharder=SINGLE,
        )
        ctx = Context.of_batch(batch, SINGLE, None)
        log_p, log_q = (
            jax.nn.log_softmax(model.logits(params, model.hidden(params, ids, ctx)[0], SINGLE))
            for model, params in ((teacher, weights), (student, found))
        )
        return float(jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)))

    assert divergence(30) < 0.6 * divergence(1)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["task.learn_to_init.map=linear"], "task.learn_to_init.map"),
        (["task.learn_to_init.steps=3"], "task.learn_to_init.steps"),
        (["task.learn_to_init.map=linear", "task.init_layers=[0]", "task.teacher.devices=1"], "task.learn_to_init.map"),
        (["task.learn_to_init.map=linear", "task.init_layers=[0]", "model=deepseek2-tiny"], "task.learn_to_init.map"),
    ],
    ids=["layers", "steps", "devices", "mixer"],
)
def test_unsupported_combinations_are_rejected(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*TASK, *overrides])
    assert key in [problem.path for problem in error.value.problems]


@pytest.mark.exhaustive
def test_a_run_starts_from_learned_maps(tmp_path: Path) -> None:
    run_ok("task=pretrain", *SMALL, "train.steps=2", "checkpoint.mode=synchronous", "run.name=teacher", cwd=tmp_path)
    sizes = [*SMALL, "model.num_heads=1", "model.head_dim=32", "train.steps=2", "train.grad_accum=2"]
    options = ["task.init_layers=[0,1]", "task.learn_to_init.map=bilinear", "task.learn_to_init.steps=3"]
    command = ["task=distill", "task.teacher.weights=outputs/teacher", *sizes, *options, "run.name=student"]
    run_ok(*command, cwd=tmp_path)
    log = (tmp_path / "outputs" / "student" / "log.txt").read_text()
    assert "learned the initial weights in 3 steps" in log
    assert facts(tmp_path / "outputs" / "student")["status"] == "finished"
