"""Jobs as JobSets. What is known of them is in the cluster, under names that follow from the sweep's folder."""

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import CLAIM, CONSOLE, Job, Proposal, Shared
from maxhydra.launch.composing import Ordering
from maxhydra.launch.gke.api_errors import RefusedError
from maxhydra.launch.gke.manifests import Manifest, Work, config_map, job_name, job_set, sweep_id, to_yaml
from maxhydra.launch.gke.placement import place
from maxhydra.launch.gke.pods import ending, leader, progress
from maxhydra.launch.gke.settings import GkeSettings
from maxhydra.launch.gke.volumes import OUTPUTS
from maxhydra.launch.job_spec import CONFIG, JobSpec, read_order
from maxhydra.launch.termination import forget, relay
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.redact import scrub_text

if TYPE_CHECKING:
    from maxhydra.launch.gke.cluster import Cluster

log = logging.getLogger("maxhydra")
# Seconds for which an answer of the cluster is taken as the state of things.
FRESH = 2.0
CONSOLE_LINES = 10_000


class GkeJobs:
    """JobSets of one namespace."""

    def __init__(self, settings: GkeSettings, shared: Shared):
        self._settings, self._shared = settings, shared
        self._sweep = sweep_id(shared.folder)
        self._seen: dict[str, Manifest] | None = None
        self._seen_at = float("-inf")

    @cached_property
    def _ordering(self) -> Ordering:
        return Ordering(self._shared)

    @cached_property
    def _cluster(self) -> "Cluster":
        try:
            from maxhydra.launch.gke.cluster import Cluster  # noqa: PLC0415
        except ModuleNotFoundError as error:
            hint = "pip install 'maxhydra[gke]'"
            raise ConfigError(Problem("hydra/launcher", f"needs the package {error.name}", "gke", hint=hint)) from None
        return Cluster(self._settings.namespace, self._settings.context)

    def prepare(self, proposal: Proposal) -> None:
        order = self._order(proposal)
        self._work(proposal, order)
        order.write(self._shared.path(proposal))

    def render(self, proposals: Sequence[Proposal]) -> str:
        """The objects as YAML. That a JobSet owns its ConfigMap is said when it is there to do so."""
        works = [self._work(proposal, self._order(proposal)) for proposal in proposals]
        pairs = [(job_set(self._settings, work), config_map(self._settings, work, owner=None)) for work in works]
        return to_yaml([document for pair in pairs for document in pair])

    def start(self, proposals: Sequence[Proposal]) -> Sequence[Job]:
        return [self._start(proposal) for proposal in proposals]

    def find(self, proposal: Proposal) -> Job | None:
        """Not one that was told to end: `start` waits for it to make room."""
        job = self._job(proposal)
        return job if self.is_running(job) and not _is_going(self._view()[self._name(proposal)]) else None

    def past(self, proposal: Proposal) -> Job | None:
        job = self._job(proposal)
        return job if (job.run.path / CLAIM).exists() and (self.is_running(job) or job.run.exists()) else None

    def is_running(self, job: Job) -> bool:
        """What a job that is over has left is brought here before anyone asks for it."""
        there = self._view().get(self._name(job.proposal))
        if there is not None and (_is_going(there) or _outcome(there) is None):
            return True
        try:
            self._bring_home(job, there)
        except RefusedError as error:
            if not error.is_passing:
                raise
            log.warning("%s", error.problems[0].reason)
            return True
        return False

    def may_restart(self, job: Job) -> bool:
        """The cluster itself starts again what was preempted; what is over has been ended on purpose."""
        return False

    def state(self, job: Job) -> str:
        there = self._view().get(self._name(job.proposal))
        if there is None:
            return ""
        if _is_going(there):
            return "ending"
        if (outcome := _outcome(there)) is not None:
            return outcome[0]
        if there["spec"].get("suspend"):
            return f"waits in queue {self._settings.queue}" if self._settings.queue else "suspended"
        return progress(self._cluster.pods(self._name(job.proposal)))

    def end(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._cluster.delete_job_set(self._name(job.proposal))
        self._seen_at = float("-inf")

    def leave(self, jobs: Sequence[Job]) -> str:
        """They need nobody who watches."""
        return f"{len(jobs)} jobs go on in namespace {self._settings.namespace}"

    def logs(self, number: int, *, follow: bool) -> Iterator[str]:
        """What the first process prints."""
        pod = leader(self._cluster.pods(job_name(self._settings.prefix, self._sweep, number)))
        if pod is None:
            reason = "has no pods: it waits, or it was deleted"
            raise ConfigError(Problem(f"job {number}", reason, hint="maxhydra sweep status says more"))
        if follow:
            yield from self._cluster.follow(pod.metadata.name)
        else:
            yield self._cluster.log(pod.metadata.name, lines=CONSOLE_LINES)

    def _job(self, proposal: Proposal) -> Job:
        return Job(proposal, RunDirectory(self._shared.path(proposal), writes=False))

    def _name(self, proposal: Proposal) -> str:
        return job_name(self._settings.prefix, self._sweep, proposal.number)

    def _order(self, proposal: Proposal) -> JobSpec:
        """The job's config, with the folders that it has in a pod."""
        order = self._ordering.order(proposal)
        run = dataclasses.replace(order.config.run, outputs=f"{OUTPUTS}/{self._shared.folder.name}")
        return dataclasses.replace(order, config=dataclasses.replace(order.config, run=run))

    def _work(self, proposal: Proposal, order: JobSpec) -> Work:
        """ConfigError where the job cannot run on the nodes that it asks for."""
        files = order.files()
        if scrub_text(files[CONFIG]) != files[CONFIG]:
            reason = "holds what looks like a secret, and a ConfigMap is read by many"
            raise ConfigError(Problem(f"job {proposal.number}", reason, hint="give it by hydra.launcher.secrets"))
        return Work(
            name=self._name(proposal),
            sweep=self._sweep,
            number=proposal.number,
            run=f"{self._shared.folder.name}/{proposal.folder}",
            files=files,
            placement=place(self._settings, order.config.hardware),
        )

    def _start(self, proposal: Proposal) -> Job:
        """Submit a job, unless it is there already: a controller that was killed may have been through half of this."""
        job = self._job(proposal)
        claim = {"jobset": self._name(proposal), "namespace": self._settings.namespace}
        replace_file(job.run.path / CLAIM, json.dumps(claim))
        work = self._work(proposal, read_order(job.run.path / CONFIG))
        manifest = job_set(self._settings, work)
        there = self._submitted(work.name, manifest)
        forget(job.run.path)
        try:
            self._cluster.create_config_map(config_map(self._settings, work, owner=there["metadata"]["uid"]))
        except RefusedError as error:
            if not error.is_passing:
                # Its pods would wait for their config for ever.
                self._cluster.delete_job_set(work.name)
            raise
        if self._seen is not None:
            # Whatever becomes of the next question: what was not seen counts as ended.
            self._seen[work.name] = there
        return job

    def _submitted(self, name: str, manifest: Manifest) -> Manifest:
        """A new JobSet, or the one that has the name: under way or done it is kept, failed or going it makes room."""
        try:
            return self._cluster.create_job_set(manifest)
        except RefusedError as error:
            if error.status != 409:
                raise
        there = self._cluster.job_set(name)
        if there is not None and not _is_going(there) and (_outcome(there) or ("",))[0] != "Failed":
            return there
        self._cluster.delete_job_set(name)
        self._cluster.wait_until_gone(name)
        return self._cluster.create_job_set(manifest)

    def _view(self) -> dict[str, Manifest]:
        """The sweep's JobSets as of a moment ago. A cluster that is out of reach for a while has not changed."""
        if time.monotonic() - self._seen_at > FRESH:
            try:
                self._seen = self._cluster.job_sets(self._sweep)
            except RefusedError as error:
                if not error.is_passing or self._seen is None:
                    raise
                log.warning("%s", error.problems[0].reason)
            self._seen_at = time.monotonic()
        assert self._seen is not None
        return self._seen

    def _bring_home(self, job: Job, there: Manifest | None) -> None:
        """Write down here how a run ended, unless its own folder can be seen."""
        if job.run.exists() or not (job.run.path / CLAIM).exists():
            return
        if there is None:
            told: dict[str, Any] = {"status": "preempted", "reason": "its JobSet is not in the cluster"}
        else:
            pods = self._cluster.pods(there["metadata"]["name"])
            told = ending(pods, _outcome(there) or ("", ""))
            self._keep_console(job.run.path, pods)
        relay(job.run.path, told, (job.run.path / CONFIG).read_text(encoding="utf-8"))

    def _keep_console(self, folder: Path, pods: Sequence[Any]) -> None:
        """What it printed, as far as the cluster still has it."""
        pod = leader(pods)
        try:
            text = self._cluster.log(pod.metadata.name, lines=CONSOLE_LINES) if pod is not None else ""
        except RefusedError:
            return
        if text:
            replace_file(folder / CONSOLE, text)


def _is_going(there: Manifest) -> bool:
    return "deletionTimestamp" in there["metadata"]


def _outcome(there: Manifest) -> tuple[str, str] | None:
    """`Completed` or `Failed`, and what is said of it; None while it is neither."""
    for condition in there.get("status", {}).get("conditions", []):
        if condition["type"] in ("Completed", "Failed") and condition["status"] == "True":
            return condition["type"], condition.get("message", "")
    return None
