"""SkyPilot tasks: `maxhydra launch render hydra/launcher=skypilot ...` prints one for each job.

SkyPilot provisions machines of any cloud and runs the task on them. A task contains the job's config and runs
`maxhydra job`; several nodes form a cluster by JAX's variables.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from maxhydra.config.errors import Problem
from maxhydra.launch.base import KEY, LauncherSettings, SweepContext, Trial, minimum_problems, pattern_problems
from maxhydra.launch.compose import compose_job, job_composer
from maxhydra.launch.gke.manifests import to_yaml
from maxhydra.launch.job_spec import CONFIG, FACTS
from maxhydra.record.redact import is_secret, is_secret_name

PORT, MOUNT = 12321, "/outputs"
PATTERNS = {
    "infra": (r"[\w.*-]+(/[\w.*-]+){0,2}", "a cloud, with region and zone: gcp, aws/us-east-1, k8s, gcp/us-central1/*"),
    "accelerators": (r"[A-Za-z][\w-]*(:\d+)?", "a name and a number, such as H100:8 or tpu-v5p-8"),
    "image": (r"\S+", "an image of the cloud, or docker:REGISTRY/IMAGE:TAG"),
    "outputs": (
        r"(gs|s3|r2)://[^\s/]+(/\S*)?|/\S+",
        "gs://bucket/runs, s3://bucket, or a folder of the machine",
    ),
}


@dataclasses.dataclass(frozen=True)
class SkypilotSettings(LauncherSettings):
    """hydra.launcher with hydra/launcher=skypilot, which renders tasks and does not start them."""

    kind: ClassVar[str] = "skypilot"

    infra: str | None = None
    """Cloud, region and zone, such as gcp/us-central1. null: the cheapest."""
    accelerators: str | None = None
    """Accelerators per node, such as H100:8. null: none."""
    nodes: int = 1
    """Nodes per job, with one process each."""
    use_spot: bool = False
    """Spot machines; `sky jobs launch` restarts a preempted job, which resumes from its checkpoint in outputs."""
    image: str | None = None
    """Machine image, or docker:IMAGE. null: SkyPilot's default."""
    outputs: str = MOUNT
    """Bucket that is mounted as the outputs folder, or a folder of the machine, which is lost with it."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables that `sky launch --secret NAME` passes on."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables that are not secret."""
    setup: tuple[str, ...] = ("pip install 'maxhydra[gpu]'",)
    """Commands that prepare a machine."""

    def problems(self) -> Iterator[Problem]:
        yield from minimum_problems(self, {"nodes": 1})
        yield from pattern_problems(self, PATTERNS)
        if not isinstance(self.use_spot, bool):
            yield Problem(f"{KEY}.use_spot", "is not a boolean", self.use_spot, "true, false")
        for name in (*self.secrets, *self.env):
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                yield Problem(f"{KEY}.env", "is malformed", name, "letters, digits and _, not starting with a digit")
        for name, value in self.env.items():
            if is_secret_name(name) or is_secret(name, str(value)):
                reason, hint = "looks like a secret, and tasks are not confidential", f"{KEY}.secrets=[{name}]"
                yield Problem(f"{KEY}.env.{name}", reason, hint=hint)


def render_tasks(settings: SkypilotSettings, sweep: SweepContext, trials: Sequence[Trial]) -> str:
    """The tasks as YAML documents; several of them are a pipeline for `sky jobs launch`."""
    composer = job_composer(sweep, trials[0])
    return to_yaml([_task(settings, sweep, trial, compose_job(composer, sweep, trial).files()) for trial in trials])


def _task(settings: SkypilotSettings, sweep: SweepContext, trial: Trial, files: dict[str, str]) -> dict[str, Any]:
    bucket, folder = _split_outputs(settings.outputs)
    resources = {"infra": settings.infra, "accelerators": settings.accelerators, "image_id": settings.image}
    variables = {**{str(name): str(value) for name, value in settings.env.items()}}
    variables |= {"MAXHYDRA_JOB": files[CONFIG], "MAXHYDRA_FACTS": files[FACTS]}
    task = {
        "name": re.sub(r"[^a-z0-9]+", "-", f"{sweep.folder.name}-{trial.number}".lower()).strip("-"),
        "resources": {key: value for key, value in resources.items() if value is not None}
        | ({"use_spot": True} if settings.use_spot else {}),
        "num_nodes": settings.nodes,
        "envs": variables,
        "secrets": dict.fromkeys(settings.secrets),
        "file_mounts": {} if bucket is None else {MOUNT: {"source": bucket, "mode": "MOUNT"}},
        "setup": "\n".join(settings.setup),
        "run": _script(settings, f"{folder}/{sweep.folder.name}/{trial.folder}"),
    }
    return {key: value for key, value in task.items() if value not in ({}, "")}


def _split_outputs(outputs: str) -> tuple[str | None, str]:
    """Bucket to mount, and the outputs folder on the machine. SkyPilot mounts whole buckets, not folders of them."""
    match = re.fullmatch(r"(?P<bucket>\w+://[^/]+)/*(?P<folder>.*)", outputs)
    if match is None:
        return None, outputs.rstrip("/")
    return match["bucket"], f"{MOUNT}/{match['folder']}".rstrip("/")


def _script(settings: SkypilotSettings, run_dir: str) -> str:
    lines = ["mkdir -p ~/maxhydra_job && cd ~/maxhydra_job"]
    lines += [f'printf %s "$MAXHYDRA_JOB" > {CONFIG}', f'printf %s "$MAXHYDRA_FACTS" > {FACTS}']
    if settings.nodes > 1:
        lines += [
            f'export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"',
            'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"',
        ]
    return "\n".join([*lines, f"python -m maxhydra job {CONFIG} --run-dir '{run_dir}'"]) + "\n"
