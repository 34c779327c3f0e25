"""Primitives of child processes that run user code or share the work of a run. Does not import jax.

`spawn_context`, `ignore_run_signals` and `exit_with_parent` are for pools of trusted workers. Reward functions are
untrusted: they may start processes of their own, which `kill_descendants` finds even in other sessions, because
`adopt_orphans` makes this process their ancestor as long as it lives.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import threading
import time
from multiprocessing import get_context, parent_process, resource_tracker
from pathlib import Path

# Not forked: the threads of JAX and of tokenizers do not survive a fork.
spawn_context = get_context("spawn")
# Signals that a terminal or a cluster sends to every process of a run.
RUN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Seconds to wait for killed processes, which only uninterruptible I/O delays.
KILL_TIMEOUT = 5.0
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def ignore_run_signals() -> None:
    """Ignore the signals of a run in a worker process: the run still needs its workers to save its final state.

    A handler that does nothing, unlike SIG_IGN, is not inherited by the programs that the worker executes.
    """
    for number in RUN_SIGNALS:
        signal.signal(number, lambda number, frame: None)


def exit_with_parent() -> None:
    """Start a thread that exits this worker process as soon as its parent does, even in the middle of a long call."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent exits (Linux; elsewhere, only process groups are killed)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when the thread that forked it exits."""
    _prctl(_PR_SET_PDEATHSIG, number)


def memory_info(proc: Path = Path("/proc")) -> dict[str, int]:
    """The memory of the host by the names of /proc/meminfo, in bytes; empty without /proc."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}


def host_bytes() -> float:
    """Memory that the host can still give to this process; infinite if the system does not report it."""
    return min(
        _free_bytes(),
        _bytes_under_limit(resource.RLIMIT_DATA, "VmData"),
        _bytes_under_limit(resource.RLIMIT_AS, "VmSize"),
    )


def _bytes_under_limit(limit: int, used: str) -> float:
    """Memory that this process may still allocate under a limit of the shell (ulimit -d, ulimit -v)."""
    size = resource.getrlimit(limit)[0]
    if size == resource.RLIM_INFINITY:
        return math.inf
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return max(0.0, size - 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{used}:")))
    except (OSError, StopIteration):
        return size


def _free_bytes() -> float:
    """Available memory of the host, or the limit of the control group, such as a container's."""
    sizes = memory_info()
    try:
        free: float = sizes["MemAvailable"] + sizes["SwapFree"]
    except LookupError:
        return math.inf
    return min(free, *group_limits())


def group_limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[float]:
    """Memory limits of this process's control groups, of either version of cgroups."""
    limits = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                folder, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
                # In a container the path may be that of the host, and the folder the container's.
                for file in (folder / path.lstrip("/") / name, folder / name):
                    text = file.read_text().strip() if file.is_file() else "max"
                    limits += [] if text == "max" else [float(text)]
    return limits


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def limit_memory(num_bytes: int) -> None:
    """Limit the data of this process and, each on its own, of its children; allocations beyond it fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # Code that crashes in every batch would fill the disk with core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def isolate_descriptors(descriptor: int) -> int:
    """Close everything except stdout, stderr and one descriptor, which moves to a high number; stdin becomes empty.

    User code that writes to low or inherited descriptors then reaches no file of the run.
    """
    private = min(os.sysconf("SC_OPEN_MAX"), 4096) - 1
    os.dup2(descriptor, private, inheritable=False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != private:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(number)
    # Its pipe to the tracker of the run was closed; user code that needs a tracker starts its own.
    vars(resource_tracker)["_resource_tracker"].__dict__.update(_fd=None, _pid=None)
    return private


def descendants(root: int | None = None) -> dict[int, float]:
    """Pids of the descendants of a process, by default this one, with their age in seconds. Empty without /proc.

    Zombies count: one that is the leader of live threads is still running.
    """
    parents: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
            parents[int(folder.name)] = int(fields[1]), age
    found: dict[int, float] = {}
    level = {root or os.getpid()}
    while level:
        level = {pid for pid, (parent, _) in parents.items() if parent in level and pid not in found}
        found |= {pid: parents[pid][1] for pid in level}
    return found


def kill_descendants() -> None:
    """Kill all descendants of this process and wait until they are gone."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while (pids := descendants()) and time.monotonic() < deadline:
        # Stopped first: a process that forks faster than the others are killed would win the race.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                send_signal(pid, number)
        reap_children()
        time.sleep(0.001)
    reap_children()


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def reap_children() -> None:
    """Collect the exit status of all children that have ended, also of adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
