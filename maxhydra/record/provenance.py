"""Provenance of a run: command, code version, packages, host. Contains no secrets, and only listed variables."""

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from maxhydra.record.redact import redact_argv, redact_text

# The only environment variables that are recorded: those that affect results, or identify where the run ran.
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
REVISION = "REVISION"
HEADER = re.compile(r"^(Name|Version):(.*)$", re.MULTILINE | re.IGNORECASE)


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
        "variables": {name: redact_text(os.environ[name]) for name in VARIABLES if name in os.environ},
    }


def code() -> tuple[dict[str, Any] | None, str]:
    """Git state of the running code, and the text of its uncommitted changes; in an image, its revision."""
    facts, diff = _git(_repository())
    return facts or image_revision(Path(__file__).resolve().parents[2]), diff


def image_revision(source: Path) -> dict[str, Any] | None:
    """Commit of the source in an image without .git: the first word of the file REVISION, another if it was changed."""
    path = source / REVISION
    sha, *changes = path.read_text(encoding="utf-8").split() or ["unknown"] if path.is_file() else ["unknown"]
    if sha == "unknown":
        return None
    return {"sha": sha, "branch": None, "remote": None, "dirty": bool(changes), "untracked": []}


def command() -> list[str]:
    """Command line as a user would type it, with secrets redacted."""
    program = Path(sys.argv[0] or sys.executable)
    is_module = program.name == "__main__.py"
    prefix = ["python", "-m", program.parent.name] if is_module else [program.name]
    return [*prefix, *redact_argv(sys.argv[1:])]


def _repository() -> Path:
    """Checkout that contains this code, or the working directory if the package was installed from a wheel."""
    package = Path(__file__).resolve().parent
    return package if _run_git(package, "rev-parse", "--show-toplevel") else Path.cwd()


def _git(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Commit, branch and dirty state, and the diff against HEAD; (None, "") outside a repository."""
    top = _run_git(path, "rev-parse", "--show-toplevel")
    if top is None:
        return None, ""
    folder = Path(top)
    status = (_run_git(folder, "status", "--porcelain") or "").splitlines()
    untracked = [line[3:] for line in status if line.startswith("??")]
    facts = {
        "sha": _run_git(folder, "rev-parse", "--verify", "-q", "HEAD"),
        "branch": _run_git(folder, "branch", "--show-current") or None,
        "remote": redact_text(_run_git(folder, "remote", "get-url", "origin") or "") or None,
        "dirty": bool(status),
        "untracked": untracked[:UNTRACKED_LIMIT],
    }
    diff = _run_git(folder, "diff", "--no-ext-diff", "--no-color", "HEAD") or ""
    if len(diff) > DIFF_LIMIT:
        # Cut at the end of a line: half a secret might not be recognized by the redaction.
        head = diff[: diff.rfind("\n", 0, DIFF_LIMIT) + 1]
        diff = f"{head}... {len(diff) - len(head)} more characters are not kept"
    return facts, redact_text(diff)


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, or None without git, outside a repository, or after a timeout."""
    # Without optional locks, `git status` cannot interfere with a concurrent commit.
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
    """Name and version of every installed distribution. Cached, since jobs of a sweep may share a process."""
    headers = [_headers(distribution) for distribution in importlib.metadata.distributions()]
    versions = {item["name"]: item["version"] for item in headers if item.keys() >= {"name", "version"}}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _headers(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """Name and version of a distribution. `distribution.metadata` parses the whole file, which contains its README."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return {name.lower(): value.strip() for name, value in HEADER.findall(text.partition("\n\n")[0])}
