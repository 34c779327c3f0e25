"""The devices of a call: compute capability of attached and absent GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

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
    assert Placement("gpu", mesh, None, None, None).capability == expected


def test_only_gpus_have_a_compute_capability() -> None:
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices("cpu")[:1])
    assert Placement("cpu", mesh, None, None, None).capability is None
    assert Placement("tpu", None, None, None, None).capability is None


def test_choices_name_the_backend_and_the_reason_against_faster_ones() -> None:
    x_BTD, weight_D = jnp.ones((1, 4, 8)), jnp.ones((8,))
    with recording_choices() as choices:
        for backend in ("auto", "auto", "reference"):
            place = Placement("cpu", None, None, None, None)
            rms_norm(x_BTD, weight_D, eps=1e-6, dtype=jnp.float32, backend=backend, place=place)
    assert [(choice.operation, choice.backend) for choice in choices] == [
        ("rms_norm", "xla"),
        ("rms_norm", "reference"),
    ]
    assert choices[0].skipped == ("triton runs on gpu, not cpu",)
