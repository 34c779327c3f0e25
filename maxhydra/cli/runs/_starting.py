"""Becomes the process of a run, as if its command had been typed."""

import os
import shlex
import sys
from pathlib import Path

import maxhydra
from maxhydra.config.errors import ConfigError, Problem


def start(arguments: list[str], folder: str, *, dry: bool) -> int:
    """Replace this process, so that signals and the exit code are the run's; with `dry`, only say what would run."""
    print(f"cd {shlex.quote(folder)} && {shlex.join(['maxhydra', *arguments])}", flush=True)
    if dry:
        return 0
    if not Path(folder).is_dir():
        raise ConfigError(Problem("folder", "is not there any more, where the run was started", value=folder))
    package = Path(maxhydra.__file__).parent.parent
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.chdir(folder)
    words = [sys.executable, "-m", "maxhydra", *arguments]
    os.execve(sys.executable, words, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
