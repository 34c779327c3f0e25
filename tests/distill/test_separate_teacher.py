"""A teacher on its own devices: the losses of one on the student's devices, and no array of it there."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.run import Train
from maxhydra.config.schema.tasks.distill import DistillTask, Divergence, Teacher
from maxhydra.data import BatchSpec, RowSpec
from maxhydra.distill.loss import TEACHER, StudentTeacher, distillation_loss
from maxhydra.distill.separate_teacher import SeparateTeacher, check_batches, logit_outputs
from maxhydra.distill.teacher import OnlineTeacher, init_from_teacher
from maxhydra.sharding import Sharder, build_mesh, split_devices
from maxhydra.tasks.distill import _process_problems
from tests.distill.test_distill import LARGER, SMALLEST, TASK, batch

SCHEDULED = {"alpha": 0.7, "beta": 0.3, "temperature": 2.0}


@pytest.fixture(scope="module")
def sharders() -> tuple[Sharder, Sharder]:
    """Of a student on six of eight devices, and of a teacher on the other two."""
    training, separate = split_devices(jax.devices(), 0.25, path="task.teacher.devices")
    student = Sharder(build_mesh(Mesh(data=3, tensor=2), training), RULES)
    return student, Sharder(build_mesh(Mesh(data=1, tensor=2), separate), RULES)


@pytest.fixture(scope="module")
def weights() -> Any:
    return [jax.jit(model.init)(jax.random.key(index)) for index, model in enumerate((SMALLEST, LARGER))]


def make_teacher(sharders: tuple[Sharder, Sharder], weights: Any, *, top_k: int | None, parts: int) -> SeparateTeacher:
    student, sharder = sharders
    spec = BatchSpec(RowSpec(seq_len=8, vocab_size=50, seed=0), 12, student.sharding(("act_batch", "act_length")))
    own = jax.device_put(weights[1], sharder.tree(LARGER.axes))
    outputs = logit_outputs(OnlineTeacher(LARGER, sharder), TASK.features.teacher_layers, top_k)
    return SeparateTeacher(outputs, own, sharder, student, spec, parts)


def rows(**columns: float) -> dict[str, jax.Array]:
    """Twelve rows: three times the four of test_distill.py, with other tokens."""
    parts = [batch(**columns) for _ in range(3)]
    for index, part in enumerate(parts):
        part["tokens"] = (part["tokens"] + 7 * index) % 50
    return {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}


def loss_and_gradient(task: DistillTask, teacher: OnlineTeacher | None, student: Sharder) -> Any:
    loss = distillation_loss(StudentTeacher(SMALLEST, student, teacher, task.features, 4), task)

    def mean(params: Any, batch: Any, teacher_weights: Any) -> jax.Array:
        sums = loss({**params, TEACHER: teacher_weights}, batch, None)
        return sums["loss"] / sums["weight"]

    return jax.jit(jax.value_and_grad(mean))


@pytest.mark.slow
def test_losses_and_gradients_equal_those_of_a_shared_mesh(sharders: tuple[Sharder, Sharder], weights: Any) -> None:
    """Divergence, cross-entropy and features, with two micro-batches of the teacher."""
    student, sharder = sharders
    separate = make_teacher(sharders, weights, top_k=None, parts=2)
    params = jax.device_put(weights[0], student.tree(SMALLEST.axes))
    placed = {name: jax.device_put(x, separate.spec.sharding_of(x.ndim)) for name, x in rows(**SCHEDULED).items()}
    taught = separate(placed)
    shared = OnlineTeacher(LARGER, Sharder.single())
    expected, gradient = loss_and_gradient(TASK, shared, Sharder.single())(weights[0], rows(**SCHEDULED), weights[1])
    value, own_gradient = loss_and_gradient(TASK, None, student)(params, taught, {})
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), own_gradient, gradient)

    training, own = (set(mesh.devices.flat) for mesh in (student.mesh, sharder.mesh))
    assert len(training) == 6 and len(own) == 2 and not training & own
    assert all(leaf.sharding.device_set == own for leaf in jax.tree.leaves(separate.weights))
    assert all(column.sharding.device_set == training for column in taught.values())
    described = separate.shapes(placed)
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in described.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in taught.items()
    }


@pytest.mark.slow
def test_top_k_logits_against_numpy(sharders: tuple[Sharder, Sharder], weights: Any) -> None:
    separate = make_teacher(sharders, weights, top_k=5, parts=1)
    everything = make_teacher(sharders, weights, top_k=None, parts=1)
    columns, logits = separate(rows()), np.asarray(everything(rows())["teacher_logits"])
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(columns["teacher_ids"], ids)
    np.testing.assert_allclose(columns["teacher_logits"], np.take_along_axis(logits, ids, -1), rtol=1e-6)


def test_a_student_on_other_devices_starts_from_the_teacher(sharders: tuple[Sharder, Sharder], weights: Any) -> None:
    student, sharder = sharders
    own = jax.device_put(weights[1], sharder.tree(LARGER.axes))
    built = init_from_teacher(SMALLEST, LARGER, own, [1], sharder=student)
    assert all(leaf.sharding.device_set == set(student.mesh.devices.flat) for leaf in jax.tree.leaves(built))
    np.testing.assert_array_equal(built["embedding"]["table"], weights[1]["embedding"]["table"])


def test_a_mesh_that_does_not_divide_the_batch_is_rejected(sharders: tuple[Sharder, Sharder]) -> None:
    student, _ = sharders
    spec = BatchSpec(RowSpec(seq_len=8, vocab_size=50, seed=0), 6, student.sharding((None, None)))
    train = dataclasses.replace(Train(), seq_len=8, grad_accum=2)
    teacher = Sharder(build_mesh(Mesh(data=2), jax.devices()[6:]), RULES)
    with pytest.raises(ConfigError, match="has 2 shards of rows, which do not divide the 3 rows of a micro-batch"):
        check_batches(spec, train, teacher)
    check_batches(dataclasses.replace(spec, batch=8), train, teacher)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["task.teacher.devices=2"], "task.teacher.devices"),
        (["task.teacher.weights=x", "task.teacher.top_k=4"], "task.teacher.top_k"),
        (["task.teacher.weights=x", "task.teacher.devices=2", "task.teacher.top_k=5000"], "task.teacher.top_k"),
    ],
)
def test_unused_and_impossible_keys(overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["task=distill", "model.vocab_size=320", *overrides])
    assert [problem.path for problem in caught.value.problems] == [path]


def test_impossible_splits_are_rejected() -> None:
    for share in (8, 1.5, 0.01):
        with pytest.raises(ConfigError, match=r"task\.teacher\.devices=\S+: is not a part of the 8 devices") as caught:
            split_devices(jax.devices(), share, path="task.teacher.devices")
        assert "1 to 7" in (caught.value.problems[0].accepted or "")
    task = DistillTask(divergence=Divergence.forward_kl, teacher=Teacher(weights="x", devices=2))
    assert [problem.path for problem in _process_problems(task, 2)] == ["task.teacher.devices"]
    assert not list(_process_problems(task, 1))
