"""Jobs on a real Kubernetes API server, which validates and garbage-collects them (see tests/support/kube.py).

No JobSet controller is there: the tests play its part, by pods that ended and conditions of the JobSet.
"""

import dataclasses
import datetime
import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config.errors import ConfigError
from maxhydra.launch.base import SweepContext, Trial
from maxhydra.launch.gke import GkeJobs, GkeSettings
from maxhydra.launch.gke.manifests import config_map, job_set
from maxhydra.record import RunDirectory
from maxhydra.sweep.plan import read_plan
from maxhydra.sweep.run import cancel, resume_sweep, status
from tests.support import cli
from tests.support.jobset import DEFINITION
from tests.support.kube import Server, missing, serving, wait_for
from tests.support.skips import import_optional

k8s = import_optional("kubernetes", extra="gke")
import_optional("optuna", extra="sweep")


MISSING = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

SETTINGS = GkeSettings(image="registry.example/maxhydra:1", outputs="gs://bucket/runs")
JOBSETS = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}
CHOICES = ["hardware=cpu", *cli.SMALL]
FINISHED = {"status": "finished", "reason": "done", "objective": {"name": "eval/loss", "value": 2.5}, "end_step": 2}
GARBAGE_SECONDS = 90


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("kube") / "cluster", DEFINITION) as it:
        yield it


@pytest.fixture
def namespace(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A namespace of its own for each test."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    name = f"test-{secrets.token_hex(4)}"
    core().create_namespace({"metadata": {"name": name}})
    return name


def core() -> Any:
    return k8s.client.CoreV1Api(k8s.config.new_client_from_config(os.environ["KUBECONFIG"]))


def objects() -> Any:
    return k8s.client.CustomObjectsApi(k8s.config.new_client_from_config(os.environ["KUBECONFIG"]))


def job_sets(namespace: str) -> dict[str, Any]:
    listed = objects().list_namespaced_custom_object(namespace=namespace, **JOBSETS)["items"]
    return {item["metadata"]["name"]: item for item in listed}


def config_maps(namespace: str) -> dict[str, Any]:
    listed = core().list_namespaced_config_map(namespace).items
    return {item.metadata.name: item for item in listed if item.metadata.name != "kube-root-ca.crt"}


def play(namespace: str, name: str, condition: str, message: str, exit_code: int, why: str = "Error") -> None:
    """What the JobSet controller and a kubelet would do: a pod that ended so, and the JobSet with it."""
    labels = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/job-index": "0"}
    template = job_sets(namespace)[name]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    pod = {"metadata": {"name": f"{name}-w-0-0-abcde", "labels": labels}, "spec": template["spec"]}
    core().create_namespaced_pod(namespace, pod)
    ended = {"exitCode": exit_code, "reason": why, "message": message}
    container = {"name": "worker", "state": {"terminated": ended}, "ready": False, "restartCount": 0}
    container |= {"image": "x", "imageID": "x"}
    phase = "Failed" if exit_code else "Succeeded"
    told = {"status": {"phase": phase, "containerStatuses": [container]}}
    core().patch_namespaced_pod_status(f"{name}-w-0-0-abcde", namespace, told)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = {"type": condition, "status": "True", "reason": condition, "message": "x", "lastTransitionTime": now}
    objects().patch_namespaced_custom_object_status(
        namespace=namespace, name=name, body={"status": {"conditions": [state]}}, **JOBSETS
    )


def test_a_job_is_sent_once_and_leaves_nothing_behind(namespace: str, tmp_path: Path) -> None:
    """Whole, also where a controller died between its two objects; and all of it goes when it is ended."""
    settings = dataclasses.replace(SETTINGS, namespace=namespace, nodes=2, queue="team")
    jobs = GkeJobs(settings, SweepContext(tmp_path / "lr", tuple(CHOICES), None))
    trial = Trial(0, "0", ())
    jobs.prepare(trial)
    assert jobs.find_active(trial) is None and jobs.find_started(trial) is None
    (job,) = jobs.start([trial])
    ((name, there),) = job_sets(namespace).items()
    description = jobs._work(trial, jobs._order(trial))
    # The server drops what its schema does not know: nothing was.
    assert there["spec"] == job_set(settings, description)["spec"]
    made = config_maps(namespace)[name]
    assert [owner.uid for owner in made.metadata.owner_references] == [there["metadata"]["uid"]]
    assert made.data == config_map(settings, description, None)["data"] and made.immutable
    assert jobs.is_running(job) and jobs.state(job) == "waits for its pods"
    core().delete_namespaced_config_map(name, namespace)
    again = GkeJobs(settings, SweepContext(tmp_path / "lr", tuple(CHOICES), None))
    assert again.find_active(trial) is not None
    again.start([trial])
    assert job_sets(namespace)[name]["metadata"]["uid"] == there["metadata"]["uid"]
    assert [owner.uid for owner in config_maps(namespace)[name].metadata.owner_references] == [there["metadata"]["uid"]]
    again.stop([job])
    wait_for(lambda: not job_sets(namespace) and not config_maps(namespace), GARBAGE_SECONDS)
    wait_for(lambda: not again.is_running(job), 10)
    assert job.status() == "preempted"


def test_a_sweep_is_left_alone_watched_and_gone_on_with(namespace: str, server: Server, tmp_path: Path) -> None:
    """Submitted by one command, looked after by another: one job finishes, one fails, is tried again, is cancelled."""
    options = {"namespace": namespace, "image": SETTINGS.image, "outputs": SETTINGS.outputs, "detach": "true"}
    launcher = ["hydra/launcher=gke", *(f"hydra.launcher.{key}={value}" for key, value in options.items())]
    command = ["-m", *CHOICES, *launcher, "run.seed=1,2", "run.name=s"]
    cli.finished(*command, cwd=tmp_path, KUBECONFIG=str(server.kubeconfig))
    first, second = sorted(job_sets(namespace))
    plan = read_plan(tmp_path / "outputs" / "s")
    assert [line for line in status(plan) if "has not begun  waits for its pods" in line]
    play(namespace, first, "Completed", json.dumps(FINISHED), 0)
    said: list[str] = []
    watching = threading.Thread(target=resume_sweep, args=(plan, said.append))
    watching.start()
    play(namespace, second, "Failed", "Killed\n", 137, why="OOMKilled")
    watching.join(60)
    assert "job 1: found running" in said and said[-1] == "1 finished, 1 failed"
    assert any("OOMKilled, exit code 137" in line and "(Failed)" in line for line in said)
    run = RunDirectory(tmp_path / "outputs" / "s" / "0_seed=1", writes=False)
    assert (run.read()["objective"]["value"], run.read()["status"]) == (2.5, "finished")
    before = job_sets(namespace)
    core().delete_collection_namespaced_pod(namespace, grace_period_seconds=0)
    resume_sweep(plan, said.append, detach=True)
    after = job_sets(namespace)
    assert after[first]["metadata"]["uid"] == before[first]["metadata"]["uid"]
    assert after[second]["metadata"]["uid"] != before[second]["metadata"]["uid"]
    cancel(plan, said.append)
    assert "1 jobs were told to end" in said[-1]
    wait_for(lambda: list(job_sets(namespace)) == [first] == list(config_maps(namespace)), GARBAGE_SECONDS)


def test_refusals_are_one_line(namespace: str, tmp_path: Path) -> None:
    """By who may do what, by quota, by names that cannot be."""
    trial, shared = Trial(0, "0", ()), SweepContext(tmp_path / "s", tuple(CHOICES), None)
    GkeJobs(SETTINGS, shared).prepare(trial)

    def refused(**settings: Any) -> str:
        jobs = GkeJobs(dataclasses.replace(SETTINGS, **{"namespace": namespace, **settings}), shared)
        with pytest.raises(ConfigError) as caught:
            jobs.start([trial])
        (problem,) = caught.value.problems
        assert "\n" not in problem.reason
        return str(problem)

    told = refused(context="nobody")
    assert 'User "nobody" cannot create resource "jobsets"' in told and "docs/launch.md" in told
    assert "namespace=nowhere" in refused(namespace="nowhere")
    assert "leads to no cluster" in refused(context="elsewhere")
    assert "is invalid" in refused(prefix="Not_A_Name") and not job_sets(namespace)
    quota = {"hard": {"count/configmaps": "0"}}
    core().create_namespaced_resource_quota(namespace, {"metadata": {"name": "team"}, "spec": quota})
    core().patch_namespaced_resource_quota_status(
        "team", namespace, {"status": {**quota, "used": {"count/configmaps": "0"}}}
    )
    told = refused()
    assert "exceeded quota: team" in told and "hydra.launcher.queue" in told
    # The JobSet that was made before does not stay without its config.
    wait_for(lambda: not job_sets(namespace), GARBAGE_SECONDS)
