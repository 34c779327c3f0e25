"""Eight simulated CPU devices for every test, set before jax is imported; meshes are built over `jax.devices()[:n]`.

JAX_COMPILATION_CACHE_DIR keeps compiled programs from one session to the next. The last flag is that of
conf/hardware/cpu.yaml.
"""

import gc
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import compile_cache as compiling

# The skip policy.
pytest_plugins = ["tests.support.skips"]

COMPILED = compiling.begin()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), compiling.flags(8), "--xla_cpu_experimental_ynn_fusion_type="]
)

# A process that has compiled so much gets slower, and two of them fill a small machine.
FULL_BYTES = 3 * 2**30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left alone with one at the end; whole, for their fixtures."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    compiling.cycles_are_rare()


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_go_when_there_are_many():
    yield
    import jax

    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    if pages * resource.getpagesize() > FULL_BYTES:
        jax.clear_caches()
        gc.collect()


def pytest_unconfigure() -> None:
    if COMPILED is not None:
        shutil.rmtree(COMPILED, ignore_errors=True)
