"""The devices of a call: compute capability of attached and absent GPUs."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from maxhydra.kernels.placement import Placement


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
    assert Placement("gpu", mesh, None, None, None).capability == expected


def test_only_gpus_have_a_compute_capability() -> None:
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices("cpu")[:1])
    assert Placement("cpu", mesh, None, None, None).capability is None
    assert Placement("tpu", None, None, None, None).capability is None
