"""Jobs as JobSets. All state is in the cluster, under names derived from the sweep's folder.

Progress and results are read from the pods of a job.
"""

import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxhydra.config.compose.composer import Composer
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import CLAIM, CONSOLE, Job, SweepContext, Trial
from maxhydra.launch.compose import compose_job, job_composer
from maxhydra.launch.gke.api_errors import ClusterApiError
from maxhydra.launch.gke.manifests import (
    CONTAINER,
    JOB_INDEX,
    JobDescription,
    Manifest,
    choose_placement,
    config_map_manifest,
    job_name,
    job_set_manifest,
    sweep_id,
    to_yaml,
)
from maxhydra.launch.gke.settings import OUTPUTS, GkeSettings
from maxhydra.launch.job_spec import (
    CONFIG,
    JobSpec,
    decode_message,
    read_job_spec,
    remove_relayed_run,
    write_relayed_run,
)
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.redact import variables_in

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"


def leader_pod(pods: Sequence[Any]) -> Any | None:
    """Pod of the first process, which writes the run."""
    return min(pods, key=_index, default=None)


def describe_progress(pods: Sequence[Any]) -> str:
    """Summarize pod phases: `pods: 1 pending, 2 running (ImagePullBackOff)`."""
    if not pods:
        return "waits for its pods"
    phases = Counter(pod.status.phase.lower() for pod in pods)
    obstacles = sorted({reason for pod in pods if (reason := _obstacle(pod))})
    summary = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    why = f" ({', '.join(obstacles)})" if obstacles else ""
    return f"pods: {summary}{why}"


def run_result(pods: Sequence[Any], outcome: tuple[str, str]) -> dict[str, Any]:
    """Facts for run.json: the leader's termination message if it left one, else derived from the pods' states."""
    state, condition_message = outcome
    leader = leader_pod(pods)
    message = decode_message(ended.message) if leader is not None and (ended := _terminated(leader)) else None
    if state == "Completed":
        return message or {"status": "finished", "reason": "its JobSet is complete"}
    if message is not None and message["status"] in ("failed", "preempted"):
        return message
    failures = [f"{pod.metadata.name}: {_failure(end)}" for pod in pods if (end := _terminated(pod)) and end.exit_code]
    return {"status": "failed", "reason": "; ".join([*failures[:3], condition_message or "its JobSet failed"])}


def _index(pod: Any) -> tuple[int, int]:
    known = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    return int(known.get(JOB_INDEX, 0)), int(known.get(COMPLETION_INDEX, 0))


def _terminated(pod: Any) -> Any | None:
    """Terminated state of the worker container; None while it runs."""
    statuses = pod.status.container_statuses or []
    states = [status.state for status in statuses if status.name == CONTAINER]
    return states[0].terminated if states and states[0] is not None else None


def _failure(ended: Any) -> str:
    """`OOMKilled, exit code 137`, and the last line of output."""
    message = decode_message(ended.message)
    last = (message or {}).get("reason") or ((ended.message or "").strip().splitlines() or [""])[-1]
    return ", ".join(filter(None, [ended.reason, f"exit code {ended.exit_code}", last]))


def _obstacle(pod: Any) -> str:
    """Why a pod is not running: image pull errors, or no matching node."""
    for status in pod.status.container_statuses or []:
        if status.state is not None and status.state.waiting is not None:
            return str(status.state.waiting.reason)
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return str(condition.reason)
    return ""


if TYPE_CHECKING:
    from maxhydra.launch.gke.cluster import Cluster

log = logging.getLogger("maxhydra")
# Seconds for which a response of the cluster counts as its current state.
CACHE_SECONDS = 2.0
CONSOLE_LINES = 10_000


class GkeJobs:
    """Runs jobs as JobSets in one namespace."""

    def __init__(self, settings: GkeSettings, sweep: SweepContext):
        self._settings, self._sweep = settings, sweep
        self._sweep_id = sweep_id(sweep.folder)
        self._job_sets: dict[str, Manifest] | None = None
        self._fetched_at = float("-inf")
        self._composer: Composer | None = None

    @cached_property
    def _cluster(self) -> "Cluster":
        try:
            from maxhydra.launch.gke.cluster import Cluster  # noqa: PLC0415
        except ModuleNotFoundError as error:
            hint = "pip install 'maxhydra[gke]'"
            raise ConfigError(Problem("hydra/launcher", f"needs the package {error.name}", "gke", hint=hint)) from None
        return Cluster(self._settings.namespace, self._settings.context)

    def prepare(self, trial: Trial) -> None:
        spec = self._compose(trial)
        self._describe(trial, spec)
        spec.write(self._sweep.path(trial))

    def render(self, trials: Sequence[Trial]) -> str:
        """Render the objects as YAML. The ConfigMap has no owner reference yet: that needs the JobSet's uid."""
        settings = self._settings
        jobs = [self._describe(trial, self._compose(trial)) for trial in trials]
        pairs = [(job_set_manifest(settings, job), config_map_manifest(settings, job, owner=None)) for job in jobs]
        return to_yaml([document for pair in pairs for document in pair])

    def start(self, trials: Sequence[Trial]) -> Sequence[Job]:
        return [self._start(trial) for trial in trials]

    def find_active(self, trial: Trial) -> Job | None:
        """Ignores a JobSet that is being deleted: `start` waits until its name is free."""
        job = self._job(trial)
        is_active = self.is_running(job) and not _is_being_deleted(self._current_job_sets()[self._name(trial)])
        return job if is_active else None

    def find_started(self, trial: Trial) -> Job | None:
        job = self._job(trial)
        return job if (job.run.path / CLAIM).exists() and (self.is_running(job) or job.run.exists()) else None

    def is_running(self, job: Job) -> bool:
        """Also saves the result of a job that has ended, before anyone reads it."""
        job_set = self._current_job_sets().get(self._name(job.trial))
        if job_set is not None and (_is_being_deleted(job_set) or _outcome(job_set) is None):
            return True
        try:
            self._save_result(job, job_set)
        except ClusterApiError as error:
            if not error.is_transient:
                raise
            log.warning("%s", error.problems[0].reason)
            return True
        return False

    def may_restart(self, job: Job) -> bool:
        """Never: JobSets restart preempted pods themselves, so a job that is over was stopped on purpose."""
        return False

    def state(self, job: Job) -> str:
        job_set = self._current_job_sets().get(self._name(job.trial))
        if job_set is None:
            return ""
        if _is_being_deleted(job_set):
            return "ending"
        if (outcome := _outcome(job_set)) is not None:
            return outcome[0]
        if job_set["spec"].get("suspend"):
            return f"waits in queue {self._settings.queue}" if self._settings.queue else "suspended"
        return describe_progress(self._cluster.pods(self._name(job.trial)))

    def stop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._cluster.delete_job_set(self._name(job.trial))
        self._fetched_at = float("-inf")

    def on_interrupt(self, jobs: Sequence[Job]) -> str:
        """Leave the jobs running: they do not need a controller."""
        return f"{len(jobs)} jobs continue in namespace {self._settings.namespace}"

    def logs(self, number: int, *, follow: bool) -> Iterator[str]:
        """Log of the first process of a job."""
        pod = leader_pod(self._cluster.pods(job_name(self._settings.prefix, self._sweep_id, number)))
        if pod is None:
            reason = "has no pods: it is queued, or was deleted"
            raise ConfigError(Problem(f"job {number}", reason, hint="see maxhydra sweep status"))
        if follow:
            yield from self._cluster.follow(pod.metadata.name)
        else:
            yield self._cluster.log(pod.metadata.name, lines=CONSOLE_LINES)

    def _job(self, trial: Trial) -> Job:
        return Job(trial, RunDirectory(self._sweep.path(trial), writes=False))

    def _name(self, trial: Trial) -> str:
        return job_name(self._settings.prefix, self._sweep_id, trial.number)

    def _compose(self, trial: Trial) -> JobSpec:
        """Compose the job's config, with the output folder as mounted in the pod."""
        if self._composer is None:
            self._composer = job_composer(self._sweep, trial)
        spec = compose_job(self._composer, self._sweep, trial)
        run = dataclasses.replace(spec.config.run, outputs=f"{OUTPUTS}/{self._sweep.folder.name}")
        return dataclasses.replace(spec, config=dataclasses.replace(spec.config, run=run))

    def _describe(self, trial: Trial, spec: JobSpec) -> JobDescription:
        """Raises ConfigError if the job cannot run on the requested nodes, or its config contains a secret."""
        files = spec.files()
        missing = sorted(set(variables_in(files[CONFIG])) - set(self._settings.env))
        if missing and not self._settings.secrets:
            reason = f"refers to ${{oc.env:{missing[0]}}}, a variable that its pods do not have"
            hint = "name a Secret that has it in hydra.launcher.secrets, or set it in hydra.launcher.env"
            raise ConfigError(Problem(f"job {trial.number}", reason, hint=hint))
        return JobDescription(
            name=self._name(trial),
            sweep=self._sweep_id,
            number=trial.number,
            run=f"{self._sweep.folder.name}/{trial.folder}",
            files=files,
            placement=choose_placement(self._settings, spec.config.hardware),
        )

    def _start(self, trial: Trial) -> Job:
        """Submit a job. Idempotent: a controller that was killed may have completed part of this."""
        job = self._job(trial)
        claim = {"jobset": self._name(trial), "namespace": self._settings.namespace}
        replace_file(job.run.path / CLAIM, json.dumps(claim))
        description = self._describe(trial, read_job_spec(job.run.path / CONFIG))
        job_set = self._create_or_adopt(description.name, job_set_manifest(self._settings, description))
        remove_relayed_run(job.run.path)
        try:
            uid = job_set["metadata"]["uid"]
            self._cluster.create_config_map(config_map_manifest(self._settings, description, owner=uid))
        except ClusterApiError as error:
            if not error.is_transient:
                # Its pods would wait for the ConfigMap forever.
                self._cluster.delete_job_set(description.name)
            raise
        if self._job_sets is not None:
            # If the next request fails, a job missing from the cached state would count as ended.
            self._job_sets[description.name] = job_set
        return job

    def _create_or_adopt(self, name: str, manifest: Manifest) -> Manifest:
        """Create a JobSet, or adopt the existing one if it is running or complete; a failed one is replaced."""
        try:
            return self._cluster.create_job_set(manifest)
        except ClusterApiError as error:
            if error.status != 409:
                raise
        existing = self._cluster.job_set(name)
        if existing is not None and not _is_being_deleted(existing) and (_outcome(existing) or ("",))[0] != "Failed":
            return existing
        self._cluster.delete_job_set(name)
        self._cluster.wait_until_deleted(name)
        return self._cluster.create_job_set(manifest)

    def _current_job_sets(self) -> dict[str, Manifest]:
        """JobSets of the sweep, cached briefly. While the cluster is unreachable, the last known state is kept."""
        if time.monotonic() - self._fetched_at > CACHE_SECONDS:
            try:
                self._job_sets = self._cluster.job_sets(self._sweep_id)
            except ClusterApiError as error:
                if not error.is_transient or self._job_sets is None:
                    raise
                log.warning("%s", error.problems[0].reason)
            self._fetched_at = time.monotonic()
        assert self._job_sets is not None
        return self._job_sets

    def _save_result(self, job: Job, job_set: Manifest | None) -> None:
        """Write the run's result and console to the local folder, unless the run's own folder is visible there."""
        if job.run.exists() or not (job.run.path / CLAIM).exists():
            return
        if job_set is None:
            result: dict[str, Any] = {"status": "preempted", "reason": "its JobSet is not in the cluster"}
        else:
            pods = self._cluster.pods(job_set["metadata"]["name"])
            result = run_result(pods, _outcome(job_set) or ("", ""))
            self._save_console(job.run.path, pods)
        write_relayed_run(job.run.path, result, (job.run.path / CONFIG).read_text(encoding="utf-8"))

    def _save_console(self, folder: Path, pods: Sequence[Any]) -> None:
        """Save the log of the first process, if the cluster still has it."""
        pod = leader_pod(pods)
        try:
            text = self._cluster.log(pod.metadata.name, lines=CONSOLE_LINES) if pod is not None else ""
        except ClusterApiError:
            return
        if text:
            replace_file(folder / CONSOLE, text)


def _is_being_deleted(job_set: Manifest) -> bool:
    return "deletionTimestamp" in job_set["metadata"]


def _outcome(job_set: Manifest) -> tuple[str, str] | None:
    """`Completed` or `Failed` with the condition's message; None while the JobSet is active."""
    for condition in job_set.get("status", {}).get("conditions", []):
        if condition["type"] in ("Completed", "Failed") and condition["status"] == "True":
            return condition["type"], condition.get("message", "")
    return None
