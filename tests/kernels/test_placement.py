"""The devices of a call: compute capability of attached and absent GPUs; kernels over a mesh."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxhydra.kernels.dispatch import recording_choices
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.rms_norm import rms_norm


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA B200", "10.0"),
        ("NVIDIA GB200", "10.0"),
        ("Tesla V100", None),
    ],
)
def test_capability_of_absent_gpus_follows_the_name_of_the_mesh_devices(kind: str, expected: str | None) -> None:
    mesh = AbstractMesh((8,), ("fsdp",), abstract_device=AbstractDevice(kind, 132, "gpu"))
    assert Placement("gpu", mesh).capability == expected


def test_only_gpus_have_a_compute_capability() -> None:
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices("cpu")[:1])
    assert Placement("cpu", mesh).capability is None
    assert Placement("tpu").capability is None


def make_mesh(**sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def test_splits_and_specs_name_the_axes_of_more_than_one_device() -> None:
    place = Placement("gpu", make_mesh(fsdp=2, tensor=2, one=1), batch="fsdp", heads=("tensor", "one"), vocab="one")
    assert place.splits("batch", "heads", "kv_heads", "vocab") == ("batch", "heads")
    assert place.spec("batch", None, "heads") == P("fsdp", None, ("tensor", "one"))
    assert place.dividing(batch=3, heads=4).spec("batch", "heads") == P(None, ("tensor", "one"))
    assert Placement.here().splits("batch") == ()


def scaled_square(x_BD: jax.Array, scale_D: jax.Array, index_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_BD**2 * scale_D, jnp.sin(x_BD) * index_B[:, None]


def total(run: Callable[..., Any], x_BD: jax.Array, scale_D: jax.Array, index_B: jax.Array) -> jax.Array:
    squares, sines = run(x_BD, scale_D, index_B)
    return jnp.sum(squares * jnp.cos(sines))


def mapped_arguments() -> tuple[Placement, Callable[..., Any], tuple[jax.Array, ...]]:
    """Rows over two devices, replicated over two more; a replicated scale, and an integer argument."""
    place = Placement("cpu", make_mesh(fsdp=2, tensor=2), batch="fsdp")
    rows, scale = place.spec("batch", None), place.spec(None)
    mapped = place.shard_map(scaled_square, (rows, scale, place.spec("batch")), (rows, rows))
    rng = np.random.default_rng(0)
    arrays = jnp.asarray(rng.normal(size=(4, 8))), jnp.asarray(rng.normal(size=8)), jnp.arange(4)
    return place, mapped, arrays


@pytest.mark.parametrize("is_rematerialized", [False, True])
def test_gradients_under_shard_map_equal_one_device(is_rematerialized: bool) -> None:
    _, mapped, arrays = mapped_arguments()
    run = jax.checkpoint(partial(total, mapped)) if is_rematerialized else partial(total, mapped)
    expected = jax.value_and_grad(partial(total, scaled_square), argnums=(0, 1))(*arrays)
    got = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(*arrays)
    for actual, desired in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-5)


def test_gradients_are_not_summed_over_axes_that_split_nothing() -> None:
    """The only all-reduce is that of the scale's gradient."""
    place, mapped, arrays = mapped_arguments()
    shardings = tuple(NamedSharding(place.mesh, spec) for spec in (P("fsdp"), P(), P("fsdp")))
    step = jax.jit(jax.grad(partial(total, mapped), argnums=(0, 1)), in_shardings=shardings)
    reduced = re.findall(
        r"f32\[([\d,]*)\][^=]*all-reduce\(.*replica_groups=(\S+),", step.lower(*arrays).compile().as_text()
    )
    assert [shape for shape, _ in reduced] == ["8"]


def test_inside_a_shard_map_arrays_are_local() -> None:
    place, _, (x_BD, *_) = mapped_arguments()
    seen = []

    def on_device(x_BD: jax.Array) -> jax.Array:
        inner = place.shard_map(jnp.sin, (place.spec("batch"),), place.spec("batch"))
        seen.append((place.splits("batch"), inner))
        return inner(x_BD)

    jax.shard_map(on_device, mesh=place.mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)(x_BD)
    assert seen == [((), jnp.sin)]


def test_only_axes_that_no_enclosing_shard_map_maps_are_mapped() -> None:
    place, _, (x_BD, *others) = mapped_arguments()

    def on_stage(x_BD: jax.Array) -> jax.Array:
        rows = place.spec("batch")
        return total(place.shard_map(scaled_square, (rows, P(), rows), (rows, rows)), x_BD, *others)

    run = jax.shard_map(on_stage, mesh=place.mesh, in_specs=P(), out_specs=P(), axis_names={"tensor"}, check_vma=False)
    np.testing.assert_allclose(jax.jit(run)(x_BD), total(scaled_square, x_BD, *others), rtol=1e-6)


def test_choices_name_the_backend_and_the_reason_against_faster_ones() -> None:
    x_BTD, weight_D = jnp.ones((1, 4, 8)), jnp.ones((8,))
    with recording_choices() as choices:
        for backend in ("auto", "auto", "reference"):
            place = Placement("cpu", None)
            rms_norm(x_BTD, weight_D, eps=1e-6, dtype=jnp.float32, backend=backend, place=place)
    assert [(choice.operation, choice.backend) for choice in choices] == [
        ("rms_norm", "xla"),
        ("rms_norm", "reference"),
    ]
    assert choices[0].skipped == ("triton runs on gpu, not cpu",)
