"""The batch script of a job or job array."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxhydra.launch.base import CLAIM, CONSOLE
from maxhydra.launch.job_spec import CONFIG
from maxhydra.launch.slurm.settings import SlurmSettings

# Folder below the sweep's with the batch scripts and the output of SLURM itself.
SCRIPTS = ".slurm"


def render(settings: SlurmSettings, *, name: str, sweep: Path, folders: Sequence[Path]) -> str:
    """Render the script of one job, or of an array with one task per folder."""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {parameter}" for parameter in _parameters(settings, name, sweep, len(folders))),
        "",
        "folders=(",
        *(f"  {shlex.quote(str(folder))}" for folder in folders),
        ")",
        "folder=${folders[${SLURM_ARRAY_TASK_ID:-0}]}",
        "# A killed controller may have submitted this job twice: only the one named in the claim runs.",
        f'grep -qsF \'"{name}"\' "$folder/{CLAIM}" || exit 0',
        f'exec >> "$folder/{CONSOLE}" 2>&1',
        *_setup(settings),
        f'{_command(settings, sweep)} "$folder/{CONFIG}" --run-dir "$folder"',
        "code=$?",
        *_requeue(settings),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _parameters(settings: SlurmSettings, name: str, sweep: Path, jobs: int) -> Iterator[str]:
    yield f"--job-name={name}"
    if jobs > 1:
        at_a_time = f"%{settings.array_parallelism}" if settings.array_parallelism else ""
        yield f"--array=0-{jobs - 1}{at_a_time}"
    yield f"--output={shlex.quote(f'{sweep}/{SCRIPTS}/%x-%a.out' if jobs > 1 else f'{sweep}/{SCRIPTS}/%x.out')}"
    # A requeued job appends to its earlier output.
    yield "--open-mode=append"
    yield "--requeue"
    # Sent to the processes of srun, not to this script, which waits for them.
    yield f"--signal=USR1@{settings.save_seconds}"
    for option in ("partition", "account", "qos", "constraint", "time", "mem"):
        if (value := getattr(settings, option)) is not None:
            yield f"--{option}={value}"
    yield f"--nodes={settings.nodes}"
    yield f"--ntasks-per-node={settings.tasks_per_node}"
    yield f"--cpus-per-task={settings.cpus_per_task}"
    if settings.gpus_per_node:
        yield f"--gpus-per-node={settings.gpus_per_node}"
    yield from map(str, settings.sbatch)


def _setup(settings: SlurmSettings) -> list[str]:
    return ["set -e", *map(str, settings.setup), "set +e"] if settings.setup else []


def _command(settings: SlurmSettings, sweep: Path) -> str:
    """srun command in front of the worker. If one process fails, srun kills the others, which would hang."""
    # Since SLURM 22.05, srun does not inherit --cpus-per-task from the job.
    command = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={settings.cpus_per_task}", *map(str, settings.srun)]
    mounts = [f"{sweep}:{sweep}", *map(str, settings.container_mounts)]
    match settings.container, settings.container_runtime:
        case None, _:
            pass
        case image, "pyxis":
            command += [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        case image, _:
            gpus = ["--nv"] if settings.gpus_per_node else []
            binds = [word for mount in mounts for word in ("--bind", mount)]
            command += ["apptainer", "exec", *gpus, *binds, image]
    default_python = "python" if settings.container else sys.executable
    return shlex.join([*command, settings.python or default_python, "-m", "maxhydra", "job"])


def _requeue(settings: SlurmSettings) -> list[str]:
    """Requeue a job that saved after a signal, unless it was cancelled, in which case it is no longer RUNNING."""
    return [
        "if [ $code = 138 ] || [ $code = 143 ]; then",
        # In an array, $SLURM_JOB_ID of one of the tasks equals the array's id.
        "  job=$SLURM_JOB_ID",
        "  [ -z $SLURM_ARRAY_TASK_ID ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        '  if [ "$(squeue -h -j $job -o %T)" != RUNNING ]; then',
        '    echo "maxhydra: cancelled"',
        f"  elif [ ${{SLURM_RESTART_COUNT:-0}} -ge {settings.max_requeues} ]; then",
        f'    echo "maxhydra: interrupted more than max_requeues={settings.max_requeues} times"',
        "  else",
        '    echo "maxhydra: interrupted, requeued"',
        "    scontrol requeue $job",
        "  fi",
        "fi",
    ]
