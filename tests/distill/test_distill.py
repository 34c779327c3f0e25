"""Distillation: layer features, students initialized from teacher layers, schedules, and a teacher on its own mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema import model as config
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.run import Train
from maxhydra.config.schema.tasks.distill import (
    Course,
    DistillTask,
    Divergence,
    FeatureLoss,
    Features,
    OnPolicy,
    Teacher,
)
from maxhydra.distill.loss import TEACHER, StudentTeacher, distillation_loss, held_out_divergence, values_at
from maxhydra.distill.teacher import OnlineTeacher, init_from_teacher
from maxhydra.model import build
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import next_token_loss
from tests.model.test_lora import context, model_config

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


@pytest.mark.slow
def test_features_are_the_residual_stream_after_a_layer() -> None:
    """Prefix, two repetitions of a pattern of two, remainder: compared with a model that ends after that layer."""
    whole = build(model_config(num_layers=6, **TWO_KINDS))
    params = jax.jit(whole.init)(jax.random.key(0))
    hidden, features = jax.jit(lambda params: whole.features(params, TOKENS, context(4, 8), [2, 5]))(params)
    for layer, feature in zip([2, 5], features, strict=True):
        part = build(model_config(num_layers=layer + 1, **TWO_KINDS))
        student_params = init_from_teacher(part, whole, params, range(layer + 1), sharder=Sharder(one_device(), RULES))
        short = jax.jit(lambda params, part=part: part.hidden(params, TOKENS, context(4, 8))[0])(student_params)
        normed = feature * jax.lax.rsqrt(jnp.mean(jnp.square(feature), -1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(normed * params["final_norm"]["scale"], short, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hidden, short, rtol=1e-4, atol=1e-5)


def one_device() -> jax.sharding.Mesh:
    return build_mesh(Mesh(data=1), jax.devices()[:1])


@pytest.mark.slow
def test_a_teacher_with_other_shapes_is_rejected() -> None:
    teacher = build(model_config())
    params, sharder = jax.jit(teacher.init)(jax.random.key(0)), Sharder(one_device(), RULES)
    for student, layers, reason in [
        (model_config(num_layers=2), [0], "names 1 layers, but the student has model.num_layers=2"),
        (model_config(num_layers=1), [3], "names a layer that the teacher does not have"),
        (model_config(num_layers=1, mlp_dim=8), [0], "mlp/down/kernel is (1, 40, 24) in the teacher and (1, 8, 24)"),
    ]:
        with pytest.raises(ConfigError) as caught:
            init_from_teacher(build(student), teacher, params, layers, sharder=sharder)
        assert reason in str(caught.value)


@pytest.mark.parametrize("course", Course)
def test_schedules(course: Course) -> None:
    fields = {"alpha": 1.0, "alpha_end": 0.2, "temperature": 3.0, "temperature_end": 1.0, "beta": 0.5}
    task = DistillTask(divergence=Divergence.jensen_shannon, course=course, **fields)
    found = [values_at(task, jnp.asarray(step), 101) for step in (0, 25, 50, 100, 200)]
    quarter = 0.25 if course is Course.linear else (1 - np.cos(np.pi / 4)) / 2
    progress = np.array([0, quarter, 0.5, 1, 1])
    np.testing.assert_allclose([values["alpha"] for values in found], 1 - 0.8 * progress, rtol=1e-5)
    np.testing.assert_allclose([values["temperature"] for values in found], 3 - 2 * progress, rtol=1e-5)
    assert {float(values["beta"]) for values in found} == {0.5}
    assert "beta" not in values_at(DistillTask(), jnp.asarray(0), 10)


TASK = DistillTask(
    divergence=Divergence.jensen_shannon,
    beta=0.3,
    features=Features(loss=FeatureLoss.cosine, weight=0.5, student_layers=[0], teacher_layers=[1]),
)
SMALLEST, LARGER = build(model_config(num_layers=1)), build(model_config(num_layers=2))


def loss_of(task: DistillTask, chunk: int, *, online: bool = True, **columns: Any) -> Any:
    """The sums as a function of the weights of student and teacher."""
    teacher = OnlineTeacher(LARGER, Sharder.single()) if online else None
    loss = distillation_loss(StudentTeacher(SMALLEST, Sharder.single(), teacher, task.features, chunk), task)
    return lambda weights: loss(weights, {**batch(alpha=0.7, beta=0.3, temperature=2.0), **columns}, None)


@pytest.fixture(scope="module")
def weights() -> Any:
    student, teacher = (jax.jit(model.init)(jax.random.key(i)) for i, model in enumerate((SMALLEST, LARGER)))
    return {**student, TEACHER: teacher}


@pytest.mark.exhaustive
def test_chunks_do_not_change_the_loss(weights: Any) -> None:
    def sums_and_gradient(chunk: int) -> Any:
        def total(weights: Any) -> Any:
            sums = loss_of(TASK, chunk)(weights)
            return sums["loss"], sums

        (_, sums), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(weights)
        return sums, {name: tree for name, tree in gradient.items() if name != TEACHER}

    (whole, gradient), (chunked, chunked_gradient) = sums_and_gradient(0), sums_and_gradient(2)
    assert {"loss", "weight", "divergence", "cross_entropy", "features"} == set(whole)
    for name in whole:
        np.testing.assert_allclose(chunked[name], whole[name], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), chunked_gradient, gradient)
    expected = 0.7 * whole["divergence"] + 0.3 * whole["cross_entropy"] + 0.5 * whole["features"]
    np.testing.assert_allclose(whole["loss"], expected, rtol=1e-5)


@pytest.mark.slow
def test_offline_logits_of_all_tokens_equal_the_online_teacher(weights: Any) -> None:
    def all_logits(params: Any) -> Any:
        hidden, _ = LARGER.hidden(params, TOKENS, context(4, 8))
        return jax.lax.top_k(LARGER.logits(params, hidden, Sharder.single()), 50)

    plain = DistillTask(divergence=Divergence.jensen_shannon, beta=0.3)
    online = jax.jit(loss_of(plain, 0))(weights)
    top, ids = jax.jit(all_logits)(weights[TEACHER])
    offline = jax.jit(loss_of(plain, 4, online=False, teacher_ids=ids, teacher_logits=top))(weights)
    np.testing.assert_allclose(offline["loss"], online["loss"], rtol=1e-4)


@pytest.mark.exhaustive
def test_a_teacher_on_its_own_mesh_gives_the_same_loss(weights: Any) -> None:
    """Student sharded by FSDP, teacher by tensor parallelism, over the same four devices, in one program."""
    devices = jax.devices()[:4]
    student_sharder, teacher_sharder = (
        Sharder(build_mesh(Mesh(**axes), devices), RULES) for axes in ({"data": 1, "fsdp": 4}, {"data": 2, "tensor": 2})
    )
    loss = distillation_loss(
        StudentTeacher(SMALLEST, student_sharder, OnlineTeacher(LARGER, teacher_sharder), TASK.features, 2), TASK
    )
    shardings = {**student_sharder.tree(SMALLEST.axes), TEACHER: teacher_sharder.tree(LARGER.axes)}
    rows = student_sharder.sharding(("act_batch",))
    sharded_batch = {name: jax.device_put(x, rows) for name, x in batch(alpha=0.7, beta=0.3, temperature=2.0).items()}
    sums = jax.jit(lambda weights, batch: loss(weights, batch, None))(jax.device_put(weights, shardings), sharded_batch)
    expected = jax.jit(loss_of(TASK, 0))(weights)
    for name in expected:
        np.testing.assert_allclose(sums[name], expected[name], rtol=1e-4)


@pytest.mark.exhaustive
def test_distillation_beats_training_on_the_data_alone() -> None:
    """Tokens follow a noisy rule. Both students train on the same data for as many steps, and are compared by
    KL(teacher | student) on held-out tokens."""
    rng = np.random.default_rng(0)
    steps = rng.choice([1, 2, 3, 7], p=[0.4, 0.3, 0.2, 0.1], size=(64, 17))
    text = jnp.asarray(np.cumsum(steps, axis=1) % 50)
    rows = {"tokens": text[:, :-1], "targets": text[:, 1:], "positions": jnp.tile(jnp.arange(16), (64, 1))}
    rows["weights"] = jnp.ones((64, 16))
    train_rows, eval_rows = (
        {name: column[part] for name, column in rows.items()} for part in (slice(32), slice(32, 64))
    )
    teacher, student = LARGER, SMALLEST
    comparison = StudentTeacher(student, Sharder.single(), OnlineTeacher(teacher, Sharder.single()), Features(), 0)
    trained_teacher = fit(teacher.init, next_token_loss(teacher, Sharder.single(), Train()), rows, 80)

    def kl_after(alpha: float) -> float:
        loss = distillation_loss(comparison, DistillTask(alpha=alpha))
        columns = {"alpha": jnp.full(32, alpha), "temperature": jnp.ones(32)}
        with_teacher = lambda params, batch, key: loss({**params, TEACHER: trained_teacher}, batch, key)  # noqa: E731
        params = fit(student.init, with_teacher, {**train_rows, **columns}, 40)
        sums = jax.jit(held_out_divergence(comparison))({**params, TEACHER: trained_teacher}, eval_rows, None)
        return float(sums["kl"] / sums["weight"])

    assert kl_after(1.0) < 0.9 * kl_after(0.0)


def fit(init: Any, loss: Any, rows: dict[str, jax.Array], steps: int) -> Any:
    """Weights after `steps` steps of Adam on the same rows."""
    params = jax.jit(init)(jax.random.key(3))
    adam = optax.adam(0.01)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        gradient = jax.grad(lambda params: loss(params, rows, None)["loss"] / rows["weights"].sum())(params)
        updates, state = adam.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda params: jax.lax.scan(step, (params, adam.init(params)), None, steps)[0][0])(params)


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"divergence": Divergence.jensen_shannon}, ["beta"]),
        ({"beta": 0.5, "teacher": Teacher(weights="x")}, ["beta"]),
        ({"beta_end": 0.5}, ["beta_end"]),
        ({"features": Features(loss=FeatureLoss.l2, student_layers=[0], teacher_layers=[1])}, ["features.loss"]),
        ({"init_layers": [0]}, ["init_layers"]),
        ({"on_policy": OnPolicy(fraction=0.5)}, ["on_policy.fraction"]),
    ],
)
def test_incompatible_fields(fields: dict[str, Any], paths: list[str]) -> None:
    assert [problem.path for problem in DistillTask(**fields).check()] == paths


def test_incompatible_sections() -> None:
    assert [p.path for p in Features(loss=FeatureLoss.l2).check()] == ["student_layers"]
    assert [p.path for p in Features(student_layers=[1], teacher_layers=[]).check()] == [
        "teacher_layers",
        "student_layers",
    ]
    assert [p.path for p in Teacher(model="tiny").check()] == ["model"]
    assert [p.path for p in Teacher(weights="x", overrides=["model.num_layers=2"]).check()] == ["overrides"]
    assert not list(Teacher(weights="x", model="tiny", overrides=["model.num_layers=2"]).check())
