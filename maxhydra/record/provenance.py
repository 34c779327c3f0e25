"""What a run stood on, so that it can be told from another and run again. Never a secret, nor the whole environment."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from maxhydra.record.redact import scrub_argv, scrub_text

# The only environment variables that are written down: those that change what is computed, or say where it ran.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PLATFORMS",
    "JAX_PROCESS_ID",
    "JOB_NAME",
    "JOBSET_NAME",
    "LIBTPU_INIT_ARGS",
    "NVIDIA_TF32_OVERRIDE",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST",
    "SLURM_NTASKS",
    "SLURM_RESTART_COUNT",
    "TPU_ACCELERATOR_TYPE",
    "TPU_WORKER_ID",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
DIFF_LIMIT = 1_000_000
UNTRACKED_LIMIT = 50
GIT_SECONDS = 10


def environment() -> dict[str, Any]:
    """Command, code, packages and host of this process; `diff` is the text of uncommitted changes."""
    git, diff = code()
    return {
        "command": command(),
        "folder": os.getcwd(),
        "git": git,
        "diff": diff,
        "packages": _packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpu_count": os.cpu_count(),
        "variables": {name: scrub_text(os.environ[name]) for name in VARIABLES if name in os.environ},
    }


def code() -> tuple[dict[str, Any] | None, str]:
    """The state of the code that is running, and the text of its uncommitted changes."""
    return _git(_repository())


def command() -> list[str]:
    """The command line, as one would type it, without secrets."""
    program = Path(sys.argv[0] or sys.executable)
    is_module = program.name == "__main__.py"
    words = ["python", "-m", program.parent.name] if is_module else [program.name]
    return [*words, *scrub_argv(sys.argv[1:])]


def _repository() -> Path:
    """The checkout that holds this code, or the working directory where the package was installed from a wheel."""
    here = Path(__file__).resolve().parent
    return here if _run_git(here, "rev-parse", "--show-toplevel") else Path.cwd()


def _git(where: Path) -> tuple[dict[str, Any] | None, str]:
    """Commit, branch, whether anything differs from it, and that difference; (None, "") outside a repository."""
    top = _run_git(where, "rev-parse", "--show-toplevel")
    if top is None:
        return None, ""
    folder = Path(top)
    status = (_run_git(folder, "status", "--porcelain") or "").splitlines()
    untracked = [line[3:] for line in status if line.startswith("??")]
    facts = {
        "sha": _run_git(folder, "rev-parse", "--verify", "-q", "HEAD"),
        "branch": _run_git(folder, "branch", "--show-current") or None,
        "remote": scrub_text(_run_git(folder, "remote", "get-url", "origin") or "") or None,
        "dirty": bool(status),
        "untracked": untracked[:UNTRACKED_LIMIT],
    }
    diff = _run_git(folder, "diff", "--no-ext-diff", "--no-color", "HEAD") or ""
    if len(diff) > DIFF_LIMIT:
        # Cut at the end of a line, so that no secret loses the part by which it is known.
        kept = diff[: diff.rfind("\n", 0, DIFF_LIMIT) + 1]
        diff = f"{kept}... {len(diff) - len(kept)} more characters are not kept"
    return facts, scrub_text(diff)


def _run_git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where there is no git, no repository or no answer in time."""
    # Without optional locks a status never gets in the way of somebody's commit.
    variables = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            env=variables,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip("\n")


@cache
def _packages() -> dict[str, str]:
    """Every installed distribution and its version. The jobs of a sweep may share a process, and then this too."""
    # Asked for by name, each value would have its file parsed again.
    told = [distribution.metadata for distribution in importlib.metadata.distributions()]
    found = {metadata["Name"]: metadata["Version"] for metadata in told if "Name" in metadata}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))
