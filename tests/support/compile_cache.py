"""Settings that keep tests fast: low optimization levels, and a compilation cache shared by all processes of a session.

Most of a test's time is compilation. A low optimization level halves it, and so do the old fusion emitters of XLA, in
versions that still have them; one LLVM module instead of 32 saves more on few cores. Does not import jax on import.
"""

import gc
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# XLA aborts on unknown flags; this one was removed in jax 0.11.
FLAGS += ["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []

# For commands, whose matmuls are so small that waking threads for them takes a tenth of their CPU time.
SINGLE_THREAD = "--xla_cpu_multi_thread_eigen=false"

# Cache folders older than this many seconds belong to sessions that were killed.
PREFIX, MAX_AGE_SECONDS = "maxhydra-tests-", 6 * 3600

# Test workers share the cores, and the threads of these libraries spin while they wait.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Thresholds of Python's cyclic garbage collector.
GC_THRESHOLDS = (100_000, 20, 20)

CACHE_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


def xla_flags(devices: int | None = None) -> str:
    """XLA_FLAGS for `devices` simulated devices; None leaves their number unset."""
    return " ".join([*FLAGS, *([] if devices is None else [f"--xla_force_host_platform_device_count={devices}"])])


def cache_variables() -> dict[str, str]:
    """Environment variables that make a child process use the shared compilation cache."""
    return {name: os.environ[name] for name in CACHE_VARIABLES if name in os.environ}


def set_up_cache() -> str | None:
    """Create a cache folder for the session and return it for removal; None if the environment names one."""
    folder = None
    if CACHE_VARIABLES[0] not in os.environ:
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if time.time() - path.stat().st_mtime > MAX_AGE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        folder = os.environ[CACHE_VARIABLES[0]] = tempfile.mkdtemp(prefix=PREFIX)
    os.environ.setdefault(CACHE_VARIABLES[1], "0")
    for name in THREADS:
        os.environ.setdefault(name, "1")
    return folder


def write_from_every_process() -> None:
    """Let all processes of a cluster write compiled programs to the cache.

    In jax only the first one does. On a CPU the keys differ between processes, so that the others would compile every
    program again in every run.
    """
    from jax._src import compiler

    class AsFirst:
        process_id = 0

        def __getattr__(self, name: str) -> object:
            return getattr(state, name)

    state = compiler.distributed.global_state
    compiler.distributed = SimpleNamespace(global_state=AsFirst())


def reduce_gc() -> None:
    """Freeze imported objects and run the garbage collector rarely; with its defaults it takes 5% of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
