"""How tests spend little time: they compile in a hurry, and each program once for all processes of a session.

Most of a test's time is compilation. Little optimisation halves it, and so does the older way of writing fused loops
where XLA still has it; one piece of LLVM code instead of 32 saves some more where there are few cores. Does not import
jax.
"""

import gc
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# XLA stops at a flag that it does not know, as it does at this one from jax 0.11 on.
FLAGS += ["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []

# Folders of a session that has not been heard of for so long are those of one that was killed.
PREFIX, ABANDONED = "maxhydra-tests-", 6 * 3600

# Workers share the cores, and a library's own threads wait for each other in busy loops.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Objects, rounds and rounds of rounds before Python looks for cycles.
CYCLES = (100_000, 20, 20)

KEPT = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


def flags(devices: int | None = None) -> str:
    """XLA_FLAGS of a process with so many simulated devices; None leaves them to whoever starts it."""
    return " ".join([*FLAGS, *([] if devices is None else [f"--xla_force_host_platform_device_count={devices}"])])


def kept() -> dict[str, str]:
    """The variables that make a child find what others have compiled."""
    return {name: os.environ[name] for name in KEPT if name in os.environ}


def begin() -> str | None:
    """Keep programs in a folder for the session, which its first process gets to remove; none where one is named."""
    folder = None
    if KEPT[0] not in os.environ:
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
        folder = os.environ[KEPT[0]] = tempfile.mkdtemp(prefix=PREFIX)
    os.environ.setdefault(KEPT[1], "0")
    for name in THREADS:
        os.environ.setdefault(name, "1")
    return folder


def cycles_are_rare() -> None:
    """What has been imported stays; at Python's own numbers, looking through it takes a twentieth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*CYCLES)
