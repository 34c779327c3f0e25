"""Jobs as JobSets or plain Jobs. All state is in the cluster, under names derived from the sweep's folder.

Progress and results are read from the pods of a job: metrics from their log, the result from the termination message.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from maxhydra.config.compose.composer import Composer
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import CLAIM, CONSOLE, Job, SweepContext, Trial
from maxhydra.launch.compose import compose_job, job_composer
from maxhydra.launch.gke.api_errors import ClusterApiError
from maxhydra.launch.gke.code import Code, read_changes, stored_changes
from maxhydra.launch.gke.manifests import (
    WORKLOADS,
    JobDescription,
    Manifest,
    config_map_manifest,
    job_name,
    sweep_id,
    to_yaml,
    workload_manifest,
)
from maxhydra.launch.gke.placement import choose_placement
from maxhydra.launch.gke.pods import FAILED, describe_progress, leader_pod, run_result
from maxhydra.launch.gke.settings import OUTPUTS, GkeSettings
from maxhydra.launch.job_spec import (
    CONFIG,
    JobSpec,
    read_job_spec,
    remove_relayed_run,
    write_relayed_run,
)
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.metrics import append_streamed_rows, is_streamed_row
from maxhydra.record.redact import variables_in

if TYPE_CHECKING:
    from maxhydra.launch.gke.cluster import Cluster

log = logging.getLogger("maxhydra")
# Seconds for which a response of the cluster counts as its current state.
CACHE_SECONDS = 2.0
CONSOLE_LINES = 10_000
# Seconds between readings of the metrics of a running job.
STREAM_SECONDS = 5.0


class GkeJobs:
    """Runs jobs as JobSets or Jobs in one namespace."""

    max_jobs: int | None = None

    def __init__(self, settings: GkeSettings, sweep: SweepContext):
        self._settings, self._sweep = settings, sweep
        self._sweep_id = sweep_id(sweep.folder)
        self._workload = WORKLOADS[settings.workload]
        self._workloads: dict[str, Manifest] | None = None
        self._streamed_at: dict[int, float] = {}
        """Time at which the metrics of each job were last read."""
        self._fetched_at = float("-inf")
        self._composer: Composer | None = None

    @cached_property
    def _cluster(self) -> "Cluster":
        try:
            from maxhydra.launch.gke.cluster import Cluster  # noqa: PLC0415
        except ModuleNotFoundError as error:
            hint = "pip install 'maxhydra[gke]'"
            raise ConfigError(Problem("hydra/launcher", f"needs the package {error.name}", "gke", hint=hint)) from None
        return Cluster(self._settings.namespace, self._settings.context, self._workload)

    def prepare(self, trial: Trial) -> None:
        spec = self._compose(trial)
        self._describe(trial, spec)
        spec.write(self._sweep.path(trial))

    def render(self, trials: Sequence[Trial]) -> str:
        """Render the objects as YAML. The ConfigMap has no owner reference yet: that needs the uid of its owner."""
        settings = self._settings
        code = None if settings.code is None else read_changes(settings.code)
        jobs = [replace(self._describe(trial, self._compose(trial)), code=code) for trial in trials]
        pairs = [(workload_manifest(settings, job), config_map_manifest(settings, job, owner=None)) for job in jobs]
        return to_yaml([document for pair in pairs for document in pair])

    def start(self, trials: Sequence[Trial]) -> Sequence[Job]:
        return [self._start(trial) for trial in trials]

    def find_active(self, trial: Trial) -> Job | None:
        """Ignores an object that is being deleted: `start` waits until its name is free."""
        job = self._job(trial)
        is_active = self.is_running(job) and not _is_being_deleted(self._current_workloads()[self._name(trial)])
        return job if is_active else None

    def find_started(self, trial: Trial) -> Job | None:
        job = self._job(trial)
        return job if (job.run.path / CLAIM).exists() and (self.is_running(job) or job.run.exists()) else None

    def is_running(self, job: Job) -> bool:
        """Also saves new metrics of a running job, and the result of one that has ended, before they are read."""
        workload = self._current_workloads().get(self._name(job.trial))
        if workload is not None and (_is_being_deleted(workload) or self._outcome(workload) is None):
            self._stream_metrics(job)
            return True
        try:
            self._save_result(job, workload)
        except ClusterApiError as error:
            if not error.is_transient:
                raise
            log.warning("%s", error.problems[0].reason)
            return True
        return False

    def may_restart(self, job: Job) -> bool:
        """Never: JobSets and Jobs replace preempted pods themselves, so a job that is over was stopped on purpose."""
        return False

    def state(self, job: Job) -> str:
        workload = self._current_workloads().get(self._name(job.trial))
        if workload is None:
            return ""
        if _is_being_deleted(workload):
            return "ending"
        if (outcome := self._outcome(workload)) is not None:
            return outcome[0]
        if workload["spec"].get("suspend"):
            return f"waits in queue {self._settings.queue}" if self._settings.queue else "suspended"
        return describe_progress(self._cluster.pods(self._name(job.trial)))

    def stop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._cluster.delete_workload(self._name(job.trial))
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
        name = pod.metadata.name
        lines = (
            self._cluster.follow(name)
            if follow
            else self._cluster.log(name, lines=CONSOLE_LINES).splitlines(keepends=True)
        )
        yield from (line for line in lines if not is_streamed_row(line))

    def _job(self, trial: Trial) -> Job:
        return Job(trial, RunDirectory(self._sweep.path(trial), writes=False))

    def _name(self, trial: Trial) -> str:
        return job_name(self._settings.prefix, self._sweep_id, trial.number)

    def _compose(self, trial: Trial) -> JobSpec:
        """Compose the job's config, with the output folder as mounted in the pod."""
        if self._composer is None:
            self._composer = job_composer(self._sweep, trial)
        spec = compose_job(self._composer, self._sweep, trial)
        run = replace(spec.config.run, outputs=f"{OUTPUTS}/{self._sweep.folder.name}")
        return replace(spec, config=replace(spec.config, run=run))

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

    @cached_property
    def _code(self) -> Code | None:
        return None if self._settings.code is None else stored_changes(self._settings.code, self._sweep.folder)

    def _start(self, trial: Trial) -> Job:
        """Submit a job. Idempotent: a controller that was killed may have completed part of this."""
        job = self._job(trial)
        claim = {self._settings.workload: self._name(trial), "namespace": self._settings.namespace}
        replace_file(job.run.path / CLAIM, json.dumps(claim))
        description = replace(self._describe(trial, read_job_spec(job.run.path / CONFIG)), code=self._code)
        workload = self._create_or_adopt(description.name, workload_manifest(self._settings, description))
        remove_relayed_run(job.run.path)
        try:
            uid = workload["metadata"]["uid"]
            self._cluster.create_config_map(config_map_manifest(self._settings, description, owner=uid))
        except ClusterApiError as error:
            if not error.is_transient:
                # Its pods would wait for the ConfigMap forever.
                self._cluster.delete_workload(description.name)
            raise
        if self._workloads is not None:
            # If the next request fails, a job missing from the cached state would count as ended.
            self._workloads[description.name] = workload
        return job

    def _create_or_adopt(self, name: str, manifest: Manifest) -> Manifest:
        """Create an object, or adopt the existing one if it is running or complete; a failed one is replaced."""
        try:
            return self._cluster.create_workload(manifest)
        except ClusterApiError as error:
            if error.status != 409:
                raise
        existing = self._cluster.workload(name)
        if existing is not None and not _is_being_deleted(existing) and (self._outcome(existing) or ("",))[0] != FAILED:
            return existing
        self._cluster.delete_workload(name)
        self._cluster.wait_until_deleted(name)
        return self._cluster.create_workload(manifest)

    def _current_workloads(self) -> dict[str, Manifest]:
        """Objects of the sweep, cached briefly. While the cluster is unreachable, the last known state is kept."""
        if time.monotonic() - self._fetched_at > CACHE_SECONDS:
            try:
                self._workloads = self._cluster.workloads(self._sweep_id)
            except ClusterApiError as error:
                if not error.is_transient or self._workloads is None:
                    raise
                log.warning("%s", error.problems[0].reason)
            self._fetched_at = time.monotonic()
        assert self._workloads is not None
        return self._workloads

    def _outcome(self, workload: Manifest) -> tuple[str, str] | None:
        """The condition of an object that has ended, and its message; None while it is active."""
        for condition in workload.get("status", {}).get("conditions", []):
            if condition["type"] in (self._workload.complete, FAILED) and condition["status"] == "True":
                return condition["type"], condition.get("message", "")
        return None

    def _stream_metrics(self, job: Job) -> None:
        """Append new rows in the log of a running job to its local metrics, unless its run folder is visible here."""
        number, now = job.trial.number, time.monotonic()
        if job.run.exists() or now - self._streamed_at.get(number, float("-inf")) < STREAM_SECONDS:
            return
        self._streamed_at[number] = now
        try:
            pod = leader_pod(self._cluster.pods(self._name(job.trial)))
            if pod is None or pod.status.phase != "Running":
                return
            text = self._cluster.log(pod.metadata.name, lines=CONSOLE_LINES)
        except ClusterApiError:
            # The log may not be available yet, or any more; the final result does not depend on it.
            return
        append_streamed_rows(job.run.metrics_path, text)

    def _save_result(self, job: Job, workload: Manifest | None) -> None:
        """Write the run's result and console to the local folder, unless the run's own folder is visible there."""
        if job.run.exists() or not (job.run.path / CLAIM).exists():
            return
        if workload is None:
            reason = f"its {self._workload.kind} is not in the cluster"
            result: dict[str, Any] = {"status": "preempted", "reason": reason}
        else:
            pods = self._cluster.pods(workload["metadata"]["name"])
            result = run_result(pods, self._outcome(workload) or ("", ""))
            self._save_console(job.run, pods)
        write_relayed_run(job.run.path, result, (job.run.path / CONFIG).read_text(encoding="utf-8"))

    def _save_console(self, run: RunDirectory, pods: Sequence[Any]) -> None:
        """Save the log of the first process, if the cluster still has it."""
        pod = leader_pod(pods)
        try:
            text = self._cluster.log(pod.metadata.name, lines=CONSOLE_LINES) if pod is not None else ""
        except ClusterApiError:
            return
        if text:
            # Rows that no reading has found, because the job ended soon after them.
            append_streamed_rows(run.metrics_path, text)
            lines = [line for line in text.splitlines(keepends=True) if not is_streamed_row(line)]
            replace_file(run.path / CONSOLE, "".join(lines))


def _is_being_deleted(workload: Manifest) -> bool:
    return "deletionTimestamp" in workload["metadata"]
