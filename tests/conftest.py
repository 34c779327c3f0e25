"""Eight simulated CPU devices for every test, set before jax is imported; meshes use `jax.devices()[:n]`.

Compiled programs are kept between sessions (tests/support/compile_cache.py). The last XLA flag is the one of
conf/hardware/cpu.yaml.
"""

import ctypes
import gc
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import compile_cache

# Workers and commands under test import the same hundreds of files.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Commands under test inherit it; nohup, under which tests may run, ignores the signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["tests.support.skips", "tests.support.tiers", "tests.support.cpu_time"]

CACHE_FOLDER = compile_cache.set_up_cache()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), compile_cache.xla_flags(8), "--xla_cpu_experimental_ynn_fusion_type="]
)

# Memory above which compiled programs are dropped: the process gets slower, and two of them fill a small machine.
max_resident_bytes = 3 * 2**30

# Memory of a worker with its fork server and the commands of a test.
BYTES_OF_WORKER = 6 * 2**30


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores, if memory allows: a worker often waits for commands, signals and polls."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cores + (memory >= (cores + 1) * BYTES_OF_WORKER)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a case with bytes by its argument: encoders write the time into files, and workers must collect one list."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with many slow tests first, so that no worker is left with one at the end.

    Workers take whole files (`--dist loadfile`): a fixture of a module is created once.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    compile_cache.reduce_gc()


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs():
    """Clear jax's caches after a module if the process has grown too large.

    If memory remains in use, the limit rises: clearing takes 0.4 s, and everything is traced again.
    """
    global max_resident_bytes
    yield
    if resident_bytes() > max_resident_bytes:
        import jax

        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        max_resident_bytes = max(max_resident_bytes, resident_bytes() + 2**30)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return pages * resource.getpagesize()


def pytest_unconfigure() -> None:
    if CACHE_FOLDER is not None:
        compile_cache.save_store(Path(CACHE_FOLDER))
        shutil.rmtree(CACHE_FOLDER, ignore_errors=True)
