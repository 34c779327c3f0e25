"""Eight simulated CPU devices for every test, set before jax is imported; meshes are built over `jax.devices()[:n]`.

Little optimisation, which halves the time of a test: most of it is compilation. The last flag is that of
conf/hardware/cpu.yaml.
"""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_experimental_ynn_fusion_type=",
    ]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
