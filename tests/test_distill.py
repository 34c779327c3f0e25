"""Distillation inside: features of layers, students made of teacher layers, courses, and a teacher on its own mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_lora import context, model_config

from maxhydra.config import ConfigError
from maxhydra.config import model as config
from maxhydra.config.mesh import RULES, Mesh
from maxhydra.config.tasks.distill import Course, DistillTask, Divergence, FeatureLoss, Features, Teacher
from maxhydra.distill.courses import values_at
from maxhydra.distill.inherit import inherit
from maxhydra.distill.objective import TEACHER, Comparison, distillation_loss
from maxhydra.distill.teacher import OnlineTeacher
from maxhydra.model import build
from maxhydra.sharding import Sharder, build_mesh

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (4, 8)))
TWO_KINDS = {"kinds": {"a": config.Kind(), "b": config.Kind()}, "prefix": ["a"], "pattern": ["a", "b"]}


def batch(**columns: float) -> dict[str, jax.Array]:
    shape = TOKENS.shape
    fields = {
        "tokens": TOKENS,
        "targets": jnp.roll(TOKENS, -1, axis=1),
        "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
        "weights": jnp.ones(shape).at[:, -1].set(0),
    }
    return {**fields, **{name: jnp.full(shape[0], value) for name, value in columns.items()}}


def test_features_are_what_the_layers_leave() -> None:
    """Prefix, two repetitions of a pattern of two, remainder: as a model that ends after that layer has them."""
    whole = build(model_config(num_layers=6, **TWO_KINDS))
    params = whole.init(jax.random.key(0))
    hidden, kept = whole.features(params, TOKENS, context(4, 8), [2, 5])
    np.testing.assert_allclose(hidden, whole.hidden(params, TOKENS, context(4, 8))[0], rtol=1e-5, atol=1e-6)
    for layer, found in zip([2, 5], kept, strict=True):
        part = build(model_config(num_layers=layer + 1, **TWO_KINDS))
        inherited = inherit(part, whole, params, range(layer + 1), sharder=Sharder(one_device(), RULES))
        short, _ = part.hidden(inherited, TOKENS, context(4, 8))
        normed = found * jax.lax.rsqrt(jnp.mean(jnp.square(found), -1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(normed * params["final_norm"]["scale"], short, rtol=1e-4, atol=1e-5)


def one_device() -> jax.sharding.Mesh:
    return build_mesh(Mesh(data=1), jax.devices()[:1])


def test_a_teacher_that_cannot_be_inherited_from_is_refused() -> None:
    teacher = build(model_config())
    params, sharder = teacher.init(jax.random.key(0)), Sharder(one_device(), RULES)
    for student, layers, reason in [
        (model_config(num_layers=2), [0], "names 1 layers, the student has model.num_layers=2"),
        (model_config(num_layers=1), [3], "names a layer that the teacher has not"),
        (model_config(num_layers=1, mlp_dim=8), [0], "pattern/0/mlp/down/kernel is (1, 40, 24) there, and (1, 8, 24)"),
    ]:
        with pytest.raises(ConfigError) as caught:
            inherit(build(student), teacher, params, layers, sharder=sharder)
        assert reason in str(caught.value)


@pytest.mark.parametrize("course", Course)
def test_courses(course: Course) -> None:
    fields = {"alpha": 1.0, "alpha_end": 0.2, "temperature": 3.0, "temperature_end": 1.0, "beta": 0.5}
    task = DistillTask(divergence=Divergence.jensen_shannon, course=course, **fields)
    found = [values_at(task, jnp.asarray(step), 101) for step in (0, 25, 50, 100, 200)]
    quarter = 0.25 if course is Course.linear else (1 - np.cos(np.pi / 4)) / 2
    ways = np.array([0, quarter, 0.5, 1, 1])
    np.testing.assert_allclose([values["alpha"] for values in found], 1 - 0.8 * ways, rtol=1e-5)
    np.testing.assert_allclose([values["temperature"] for values in found], 3 - 2 * ways, rtol=1e-5)
    assert {float(values["beta"]) for values in found} == {0.5}
    assert "beta" not in values_at(DistillTask(), jnp.asarray(0), 10)


def loss_of(task: DistillTask, chunk: int, teacher: OnlineTeacher | None, columns: dict[str, Any]) -> Any:
    """Sums, and the gradient by the student's weights, which begin as a student's do."""
    student = build(model_config(num_layers=2))
    comparison = Comparison(student, Sharder.single(), teacher, task.features, chunk)
    loss = distillation_loss(comparison, task)
    params = student.init(jax.random.key(1))
    beside = {} if teacher is None else {TEACHER: teacher.model.init(jax.random.key(2))}

    def total(params: Any) -> Any:
        sums = loss({**params, **beside}, {**batch(alpha=0.7, beta=0.3, temperature=2.0), **columns}, None)
        return sums["loss"], sums

    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


TASK = DistillTask(
    divergence=Divergence.jensen_shannon,
    beta=0.3,
    features=Features(loss=FeatureLoss.cosine, weight=0.5, student_layers=[0, 1], teacher_layers=[0, 2]),
)


def test_chunks_and_top_of_everything_change_nothing() -> None:
    teacher = OnlineTeacher(build(model_config()), Sharder.single())
    (_, whole), gradient = loss_of(TASK, 0, teacher, {})
    (_, parts), by_parts = loss_of(TASK, 2, teacher, {})
    assert {"loss", "weight", "divergence", "cross_entropy", "features"} == set(whole)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), by_parts, gradient)
    mixed = 0.7 * whole["divergence"] + 0.3 * whole["cross_entropy"] + 0.5 * whole["features"]
    np.testing.assert_allclose(whole["loss"], mixed, rtol=1e-5)

    # All logits of the same teacher, as if they came from a file.
    plain = DistillTask(divergence=Divergence.jensen_shannon, beta=0.3)
    (_, online), _ = loss_of(plain, 0, teacher, {})
    params = teacher.model.init(jax.random.key(2))
    hidden, _ = teacher.model.hidden(params, TOKENS, context(4, 8))
    logits = teacher.model.logits(params, hidden, Sharder.single())
    top, ids = jax.lax.top_k(logits, 50)
    for chunk in (0, 4):
        (_, offline), _ = loss_of(plain, chunk, None, {"teacher_ids": ids, "teacher_logits": top})
        np.testing.assert_allclose(offline["loss"], online["loss"], rtol=1e-4)


def test_a_teacher_on_its_own_mesh_says_the_same() -> None:
    """Student split by batch, teacher by heads and columns, over the same four devices, in one program."""
    devices = jax.devices()[:4]
    student, teacher = build(model_config(num_layers=2)), build(model_config())
    one, other = (
        Sharder(build_mesh(Mesh(**axes), devices), RULES) for axes in ({"data": 1, "fsdp": 4}, {"data": 2, "tensor": 2})
    )
    beside = OnlineTeacher(teacher, other)
    loss = distillation_loss(Comparison(student, one, beside, TASK.features, 2), TASK)
    params = jax.jit(student.init, out_shardings=one.tree(student.axes))(jax.random.key(1))
    weights = {**params, TEACHER: jax.jit(teacher.init, out_shardings=other.tree(teacher.axes))(jax.random.key(2))}
    rows = one.sharding(("act_batch",))
    placed = {name: jax.device_put(x, rows) for name, x in batch(alpha=0.7, beta=0.3, temperature=2.0).items()}
    sums = jax.jit(lambda weights, batch: loss(weights, batch, None))(weights, placed)
    (_, expected), _ = loss_of(TASK, 0, OnlineTeacher(teacher, Sharder.single()), {})
    for name in expected:
        np.testing.assert_allclose(sums[name], expected[name], rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"divergence": Divergence.jensen_shannon}, ["beta"]),
        ({"beta": 0.5, "teacher": Teacher(weights="x")}, ["beta"]),
        ({"beta_end": 0.5}, ["beta_end"]),
        ({"features": Features(loss=FeatureLoss.l2, student_layers=[0], teacher_layers=[1])}, ["features.loss"]),
        ({"init_layers": [0]}, ["init_layers"]),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], paths: list[str]) -> None:
    assert [problem.path for problem in DistillTask(**fields).check()] == paths


def test_parts_that_do_not_go_together() -> None:
    assert [p.path for p in Features(loss=FeatureLoss.l2).check()] == ["student_layers"]
    assert [p.path for p in Features(student_layers=[1], teacher_layers=[]).check()] == [
        "teacher_layers",
        "student_layers",
    ]
    assert [p.path for p in Teacher(model="tiny").check()] == ["model"]
    assert [p.path for p in Teacher(weights="x", overrides=["model.num_layers=2"]).check()] == ["overrides"]
    assert not list(Teacher(weights="x", model="tiny", overrides=["model.num_layers=2"]).check())
