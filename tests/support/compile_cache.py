"""Settings that keep tests fast: low optimization levels, and a compilation cache shared by all processes of a session.

Most of a test's time is compilation. A low optimization level halves it, and so do the old fusion emitters of XLA, in
versions that still have them; one LLVM module instead of 32 saves more on few cores. Does not import jax on import.

A session starts with the programs that earlier sessions of this user have compiled, in STORE. It works in a folder of
its own, because jax does not write entries atomically and tests kill processes: only complete entries enter the store.
"""

import contextlib
import gc
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# XLA aborts on unknown flags; this one was removed in jax 0.11.
FLAGS += ["--xla_cpu_use_fusion_emitters=false"] if version("jax").startswith("0.10.") else []

# For commands, whose matmuls are so small that waking threads for them takes a tenth of their CPU time.
SINGLE_THREAD = "--xla_cpu_multi_thread_eigen=false"

# Cache folders older than this many seconds belong to sessions that were killed.
PREFIX, MAX_AGE_SECONDS = "maxhydra-tests-", 6 * 3600

# Compiled programs of all sessions, about 200 MB; entries are compiled again after some days, so that it does not grow.
STORE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maxhydra" / "test_programs"
MAX_AGE_OF_ENTRIES = 14 * 24 * 3600

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
        load_store(Path(folder))
    os.environ.setdefault(CACHE_VARIABLES[1], "0")
    for name in THREADS:
        os.environ.setdefault(name, "1")
    return folder


def load_store(folder: Path, store: Path = STORE) -> None:
    """Copy the stored programs into the cache folder of a session, as hard links where possible."""
    for entry in _entries(store):
        if time.time() - entry.stat().st_mtime > MAX_AGE_OF_ENTRIES:
            entry.unlink(missing_ok=True)
        else:
            _link(entry, folder / entry.name)


def save_store(folder: Path, store: Path = STORE) -> None:
    """Add the complete entries of a session's cache folder to the store.

    Without zstandard, with which jax compresses entries, or a home folder, nothing is stored.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if find_spec("zstandard") is None:
        return
    known = {entry.name for entry in _entries(store)}
    for entry in _entries(folder):
        if entry.name not in known and _is_complete(entry):
            _link(entry, store / entry.name)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-cache"))


def _is_complete(entry: Path) -> bool:
    """A process that was killed leaves a truncated entry, at which jax would warn in every later session."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        decompressor.decompress(entry.read_bytes())
    except zstandard.ZstdError:
        return False
    return decompressor.eof


def _link(source: Path, target: Path) -> None:
    """Other sessions may read and write the store at the same time."""
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:  # Another file system, or one without hard links.
        with contextlib.suppress(OSError):
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copyfile(source, partial)
            partial.replace(target)


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
