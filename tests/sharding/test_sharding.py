"""Axis arithmetic, the device mesh and specs, against jax's own mesh and closed forms."""

import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import PartitionSpec as P

from maxhydra.config import ConfigError
from maxhydra.config.schema.hardware import AXES, RULES, Axes, Mesh
from maxhydra.sharding import Sharder, abstract_mesh, axis_sizes, build_mesh, bytes_per_device
from maxhydra.sharding.mesh import device_grid

# Sizes of a mesh of one device.
ONES = dict.fromkeys(AXES, 1)


def sharder(**sizes: int) -> Sharder:
    return Sharder(abstract_mesh(Mesh(**sizes), devices=math.prod(sizes.values()), slices=1), RULES)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("devices", [1, 8, 24])
def test_minus_one_takes_the_remaining_devices(axis: str, devices: int) -> None:
    other = next(name for name in AXES if name != axis)
    fixed = 2 if devices % 2 == 0 else 1
    total = dict(zip(AXES, axis_sizes(Mesh(**{axis: -1, other: fixed}), devices=devices, slices=1).total, strict=True))
    assert total == dict.fromkeys(AXES, 1) | {axis: devices // fixed, other: fixed}


def test_the_two_networks_multiply() -> None:
    sizes = axis_sizes(Mesh(fsdp=-1, tensor=2, dcn=Axes(data=2, fsdp=-1)), devices=32, slices=4)
    assert dict(zip(AXES, sizes.within, strict=True)) == {**ONES, "fsdp": 4, "tensor": 2}
    assert dict(zip(AXES, sizes.across, strict=True)) == {**ONES, "data": 2, "fsdp": 2}
    assert dict(zip(AXES, sizes.total, strict=True)) == {**ONES, "data": 2, "fsdp": 8, "tensor": 2}


@pytest.mark.parametrize(
    ("mesh", "devices", "slices", "path", "said"),
    [
        (Mesh(fsdp=4, tensor=3), 8, 1, "mesh.tensor", "mesh.fsdp x mesh.tensor = 4 x 3 = 12, but there are 8 devices"),
        (Mesh(fsdp=-1, tensor=3), 8, 1, "mesh.tensor", "accepted: 1, 2, 4, 8"),
        (Mesh(fsdp=16), 8, 1, "mesh.fsdp", "accepted: 8, or -1"),
        (Mesh(), 8, 1, "mesh.fsdp", "set mesh.fsdp=-1"),
        (Mesh(tensor=2), 1, 1, "mesh.tensor", "there is 1 device"),
        (Mesh(data=5, tensor=3), 8, 1, "mesh.tensor", "sizes with product 8"),
        (Mesh(fsdp=-1), 8, 2, "mesh.dcn.data", "set mesh.dcn.data=-1"),
        (Mesh(fsdp=-1, dcn=Axes(data=3)), 8, 2, "mesh.dcn.data", "accepted: 2"),
        (Mesh(fsdp=8, dcn=Axes(data=-1)), 8, 2, "mesh.fsdp", "4 devices in a slice"),
        (Mesh(fsdp=-1, dcn=Axes(data=-1)), 8, 3, "mesh.slices", "accepted: 1, 2, 4, 8"),
    ],
)
def test_a_size_mismatch_shows_the_arithmetic(mesh: Mesh, devices: int, slices: int, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        axis_sizes(mesh, devices=devices, slices=slices)
    assert [problem.path for problem in error.value.problems] == [path]
    assert said in str(error.value)


def test_mistakes_in_both_networks_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        axis_sizes(Mesh(fsdp=3, dcn=Axes(data=3)), devices=8, slices=2)
    assert [problem.path for problem in error.value.problems] == ["mesh.fsdp", "mesh.dcn.data"]


def fake_devices(slices: int, per_slice: int) -> list[SimpleNamespace]:
    """Devices that know their slice, in no order."""
    devices = [
        SimpleNamespace(id=i, platform="gpu", device_kind="gpu", process_index=i // 2, slice_index=i // per_slice)
        for i in range(slices * per_slice)
    ]
    return [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]


def test_slices_lie_as_in_jax() -> None:
    """The layout equals `create_hybrid_device_mesh` of the devices in order, where devices know their slice."""
    devices = fake_devices(slices=4, per_slice=8)
    grid = device_grid(Mesh(fsdp=2, sequence=2, tensor=2, dcn=Axes(data=2, fsdp=2)), devices)
    ordered = sorted(devices, key=lambda device: device.id)
    within, across = {**ONES, "fsdp": 2, "sequence": 2, "tensor": 2}, {**ONES, "data": 2, "fsdp": 2}
    expected = create_hybrid_device_mesh(tuple(within.values()), tuple(across.values()), ordered)
    ids = np.vectorize(lambda device: device.id)
    np.testing.assert_array_equal(ids(grid), ids(expected))


def test_simulated_slices_hold_neighbours() -> None:
    mesh = build_mesh(Mesh(fsdp=2, tensor=2, slices=2, dcn=Axes(data=-1)))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {**ONES, "data": 2, "fsdp": 2, "tensor": 2}
    ids = [device.id for device in jax.devices()]
    slices = mesh.devices.reshape(2, -1)
    assert [device.id for device in slices[0]] == ids[:4]
    assert [device.id for device in slices[1]] == ids[4:]


def test_mesh_over_some_devices() -> None:
    assert build_mesh(Mesh(fsdp=-1), jax.devices()[:4]).size == 4


def test_a_mesh_axis_splits_one_dimension_only() -> None:
    made = sharder(fsdp=4, tensor=2)
    assert made.spec(("layers", "embed", "heads", "head_dim")) == P(None, "fsdp", "tensor", None)
    assert made.spec(("heads", "mlp")) == P("tensor", None)
    assert made.spec((None, "mlp")) == P(None, "tensor")
    assert made.spec(()) == P()
    assert sharder(data=2, fsdp=4).spec(("act_batch", "act_length")) == P(("data", "fsdp"), None)
    assert sharder(data=2, fsdp=4, tensor=3).num_shards("act_batch") == 8


def test_rules_decide() -> None:
    mesh = abstract_mesh(Mesh(fsdp=2, tensor=2), devices=4, slices=1)
    made = Sharder(mesh, RULES | {"embed": ["tensor"], "mlp": ["fsdp", "tensor"]})
    assert made.spec(("embed", "mlp")) == P("tensor", "fsdp")
    with pytest.raises(KeyError, match="embd"):
        made.spec(("embd",))


def test_tree_tells_axes_from_containers() -> None:
    class Moments(NamedTuple):
        count: tuple
        mu: dict

    made = sharder(fsdp=2)
    tree = ({"w": ("embed", "mlp")}, Moments(count=(), mu={"w": ("norm",)}))
    shardings = made.tree(tree)
    assert shardings == (
        {"w": made.sharding(("embed", "mlp"))},
        Moments(count=made.sharding(()), mu={"w": made.sharding(("norm",))}),
    )


def test_check_lists_every_dimension_that_does_not_divide() -> None:
    axes = {
        "layers": {"attention": {"query": ("layers", "embed", "heads", "head_dim")}, "mlp": {"up": ("embed", "mlp")}}
    }
    shapes = {
        "layers": {
            "attention": {"query": jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.float32)},
            "mlp": {"up": jax.ShapeDtypeStruct((15, 9), jnp.float32)},
        }
    }
    sharder(fsdp=1).check(axes, shapes)
    with pytest.raises(ConfigError) as error:
        sharder(fsdp=8, tensor=3).check(axes, shapes)
    said = str(error.value)
    assert "mesh.tensor=3: does not divide heads=4 of layers/attention/query" in said
    assert "mesh.fsdp=8: does not divide embed=15 of layers/mlp/up" in said
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match="fsdp=2 x sequence=2, 4 shards"):
        sharder(fsdp=2, sequence=2).check(("embed",), jax.ShapeDtypeStruct((6,), jnp.float32))


def test_constrain_splits_the_value_and_keeps_it() -> None:
    made = Sharder(build_mesh(Mesh(fsdp=4, tensor=2)), RULES)
    x = np.arange(64.0).reshape(8, 8)
    y = jax.jit(lambda x: made.constrain(x, "act_batch", "act_mlp") * 1)(x)
    assert y.sharding.is_equivalent_to(made.sharding(("act_batch", "act_mlp")), 2)
    np.testing.assert_array_equal(y, x)
    with pytest.raises(ValueError, match="shape"):
        made.constrain(jnp.ones((2, 2)), "act_batch")


def test_single_is_a_static_null_object() -> None:
    single = Sharder.single()
    x = jnp.ones((3, 5))
    assert single.constrain(x, "act_batch", "act_embed") is x
    assert single == Sharder.single()
    assert hash(single) == hash(Sharder.single())
    assert single.spec(("act_batch", "act_embed")) == P(None, None)
    assert single.num_shards("act_batch") == 1


@pytest.mark.parametrize("sizes", list(itertools.product([1, 2], repeat=3)))
def test_bytes_per_device_equal_the_largest_shard(sizes: tuple[int, int, int]) -> None:
    data, fsdp, tensor = sizes
    mesh = build_mesh(Mesh(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: math.prod(sizes)])
    made = Sharder(mesh, RULES)
    array = jax.device_put(jnp.zeros((16, 6), jnp.bfloat16), made.sharding(("embed", "mlp")))
    largest = max(shard.data.nbytes for shard in array.addressable_shards)
    assert bytes_per_device(array.shape, array.dtype, made.spec(("embed", "mlp")), mesh) == largest


def test_a_gathered_gradient_is_first_constrained_to_its_own_sharding() -> None:
    """Without it XLA gathers the float32 operand of the conversion before, twice the bytes."""
    split, whole = (None, "act_stream_length"), (None, None)
    made = sharder(fsdp=2, tensor=4)

    def run(x: jax.Array) -> jax.Array:
        return jnp.sum(made.reshard(x, split, gradient=whole))

    program = str(jax.make_jaxpr(jax.grad(run))(jnp.ones((2, 8))))
    # The value, and its gradient as it comes and as it leaves.
    assert program.count("sharding_constraint[") == 3
