"""GPUs of this machine and their assignment to local jobs. Detected without jax, which would occupy their memory."""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from maxhydra.config.errors import ConfigError, Problem

VARIABLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Share of a GPU's memory that its jobs divide among them; the rest is for their CUDA contexts.
SHARED_MEMORY = 0.9
SMI_SECONDS = 30


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that jobs may use: the entries of CUDA_VISIBLE_DEVICES, else the indices of all GPUs."""
    if VARIABLE in env:
        return [name.strip() for name in env[VARIABLE].split(",") if name.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi", path=env.get("PATH", ""))
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SMI_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired:
        return []
    return re.findall(r"^GPU (\d+): ", listed, re.MULTILINE)


class GpuPool:
    """Assigns `per_job` GPUs to each job, with at most `jobs_per_gpu` jobs on a GPU."""

    def __init__(self, names: Sequence[str], *, per_job: int, jobs_per_gpu: int):
        if len(names) < per_job:
            hint = f"set {VARIABLE} to the GPUs to use, or request fewer"
            reason = f"is more than the {len(names)} GPUs that this machine has"
            accepted = f"1 to {len(names)}" if names else "null"
            raise ConfigError(Problem("hydra.launcher.gpus_per_job", reason, per_job, accepted, hint))
        self._names, self._per_job, self._jobs_per_gpu = list(names), per_job, jobs_per_gpu

    @property
    def max_jobs(self) -> int:
        """Number of jobs that can run at a time."""
        return len(self._names) // self._per_job * self._jobs_per_gpu

    def assign(self, occupied: Iterable[Sequence[str]]) -> list[str]:
        """The least used GPUs, given those of the running jobs."""
        load = Counter(name for names in occupied for name in names)
        free = [name for name in self._names if load[name] < self._jobs_per_gpu]
        assert len(free) >= self._per_job, "more jobs than max_jobs"
        return sorted(free, key=lambda name: load[name])[: self._per_job]

    def variables(self, names: Sequence[str]) -> dict[str, str]:
        """Environment of a job with these GPUs; jobs that share a GPU divide its memory evenly."""
        if self._jobs_per_gpu == 1:
            return {VARIABLE: ",".join(names)}
        share = float(os.environ.get(MEMORY, SHARED_MEMORY)) / self._jobs_per_gpu
        return {VARIABLE: ",".join(names), MEMORY: f"{share:.3f}"}
