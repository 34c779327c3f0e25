"""SOAP on meshes of simulated devices; test_optim.py compares it with NumPy on one device."""

import dataclasses
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra.config.schema.hardware import Mesh
from maxhydra.config.schema.optimizer import Optimizer as Config
from maxhydra.config.schema.optimizer import OptimizerKind, Schedule, ScheduleKind
from maxhydra.kernels.placement import Placement
from maxhydra.optim import build, state_axes
from maxhydra.optim.distribute import map_matrices
from maxhydra.plan.case import Case, Subject
from maxhydra.plan.memory import memory
from maxhydra.sharding import Sharder, build_mesh, is_axes
from tests.support.cli import SMALL
from tests.support.mesh_cases import Case as MeshCase
from tests.support.mesh_cases import train
from tests.support.states import plan

AXES = {
    "query": ("layers", "embed", "heads", "head_dim"),
    "up": ("layers", "experts", "embed", "mlp"),
    "prefix": ("embed", "heads"),
    "norm": ("norm",),
}
SHAPES = {"query": (2, 8, 4, 2), "up": (2, 4, 8, 8), "prefix": (8, 8), "norm": (8,)}
PARAMETERS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
SOAP = Config(
    kind=OptimizerKind.soap,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    precondition_every=2,
    precondition_max_dim=8,
    clip_norm=None,
    schedule=Schedule(kind=ScheduleKind.constant),
)
STEPS = 4


def sharder_of(**axes: int) -> Sharder:
    mesh = Mesh(**{"fsdp": 1, **axes})
    return Sharder.from_config(mesh, build_mesh(mesh, jax.devices()[: math.prod(axes.values())]))


def random_tree(seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def updated(sharder):
    """Parameters after a few updates, and the last state."""
    optimizer = build(SOAP, steps=STEPS, shapes=PARAMETERS, axes=AXES, sharder=sharder)
    shapes = jax.eval_shape(optimizer.transform.init, PARAMETERS)
    axes = state_axes(optimizer, PARAMETERS, AXES)
    place = lambda names, leaf: NamedSharding(sharder.mesh, sharder.dividing_spec(names, leaf.shape))  # noqa: E731
    shardings = jax.tree.map(place, (AXES, axes), (PARAMETERS, shapes), is_leaf=is_axes)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.transform.update(grads, state, params)
        return jax.lax.with_sharding_constraint((optax.apply_updates(params, updates), state), shardings)

    params, state = jax.device_put((random_tree(0), optimizer.transform.init(random_tree(0))), shardings)
    for number in range(STEPS):
        params, state = step(params, state, jax.device_put(random_tree(1 + number), shardings[0]))
    return params, state


@pytest.fixture(scope="module")
def one_device():
    return jax.device_get(updated(sharder_of(fsdp=1)))


MESHES = [{"fsdp": 2, "tensor": 2}, {"data": 2, "expert": 2}, {"stage": 2, "sequence": 2, "tensor": 2}]


@pytest.mark.slow
@pytest.mark.default_cases("fsdp2_tensor2")
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "_".join(f"{axis}{size}" for axis, size in mesh.items()))
def test_updates_on_a_mesh_equal_one_device(mesh, one_device):
    """The first step initializes the bases, the third refreshes them. All sides have full rank."""
    params, state = updated(sharder_of(**mesh))
    for found, expected in zip(jax.tree.leaves((params, state)), jax.tree.leaves(one_device), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [(None, "fsdp", "tensor"), (None, None, "tensor"), ("fsdp", "tensor", None)], ids=str)
def test_each_matrix_is_computed_on_one_device(spec):
    """Eight matrices on 8 devices, two of whose axes the sharding may not use: as many calls, with whole matrices."""
    sharder = sharder_of(data=2, fsdp=2, tensor=2)
    seen, lock = [], threading.Lock()

    def count(matrix):
        with lock:
            seen.append(float(matrix[0, 0]))
        return np.linalg.inv(matrix)

    def invert(matrix):
        return jax.pure_callback(count, jax.ShapeDtypeStruct(matrix.shape, matrix.dtype), matrix)

    matrices = np.random.default_rng(0).normal(size=(8, 4, 4)).astype(np.float32)
    placed = jax.device_put(matrices, NamedSharding(sharder.mesh, PartitionSpec(*spec)))
    place = Placement(sharder.platform, sharder.mesh)
    run = jax.jit(lambda x: map_matrices(invert, [(x,)], [PartitionSpec(*spec)], place)[0])
    np.testing.assert_allclose(run(placed), np.linalg.inv(matrices), rtol=1e-3, atol=1e-4)
    assert sorted(seen) == sorted(matrices[:, 0, 0].tolist())


@pytest.mark.slow
def test_state_is_sharded_over_the_axes_of_the_weight_and_planned_so():
    """A quarter of every basis is on each device; task=plan counts the same bytes."""
    states, config = plan("optimizer=soap", "model.num_kv_heads=2", fsdp=2, tensor=2)
    shapes, shardings = states.optimizer_shapes(), states.shardings().opt_state
    on_device = [
        (keys, leaf.size, math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
        for (keys, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
        )
    ]
    bases = [(size, held) for keys, size, held in on_device if "vectors" in jax.tree_util.keystr(keys)]
    assert bases and all(held == size for size, held in bases), "4 bytes of a quarter of the entries"
    case = Case.of(Subject.of(config), devices=4, slices=1)
    assert memory(case).optimizer == sum(held for _, _, held in on_device)


@pytest.mark.exhaustive
def test_losses_on_a_mesh_equal_one_device():
    """Sides longer than the other one are not rotated: eigenvectors of a zero eigenvalue depend on rounding."""
    options = [*SMALL, "model.num_kv_heads=2", "optimizer=soap", "optimizer.precondition_every=2"]
    options += ["optimizer.precondition_max_dim=32", "model.dtypes.compute=float32", "train.steps=6"]
    one = MeshCase(options, devices=1, rows=8, length=32, steps=6)
    four = dataclasses.replace(one, overrides=[*options, "mesh.fsdp=2", "mesh.tensor=2"], devices=4)
    np.testing.assert_allclose(train(four).losses, train(one).losses, rtol=1e-5)
