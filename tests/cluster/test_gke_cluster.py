"""Jobs on a real Kubernetes API server, which validates and garbage-collects them (see tests/support/kube.py).

There is no JobSet controller: the tests simulate it by creating terminated pods and setting conditions of the JobSet.
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
from maxhydra.launch.gke.manifests import config_map_manifest, job_set_manifest
from maxhydra.record import RunDirectory
from maxhydra.sweep.plan import read_plan
from maxhydra.sweep.run import cancel, resume_sweep, status
from tests.support import cli
from tests.support.jobset import DEFINITION
from tests.support.kube import Server, missing, serving
from tests.support.polling import wait_for
from tests.support.skips import import_optional

k8s = import_optional("kubernetes", extra="gke")
import_optional("optuna", extra="sweep")


MISSING = missing()
pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

SETTINGS = GkeSettings(image="registry.example/maxhydra:1", outputs="gs://bucket/runs")
JOBSETS = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}
CHOICES = ["hardware=cpu", *cli.SMALL]
FINISHED = {"status": "finished", "reason": "done", "objective": {"name": "eval/loss", "value": 2.5}, "end_step": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("kube") / "cluster", DEFINITION) as running_server:
        yield running_server


@pytest.fixture
def namespace(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A separate namespace for each test."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    name = f"test-{secrets.token_hex(4)}"
    core().create_namespace({"metadata": {"name": name}})
    return name


def core() -> Any:
    return k8s.client.CoreV1Api(k8s.config.new_client_from_config(os.environ["KUBECONFIG"]))


def objects() -> Any:
    return k8s.client.CustomObjectsApi(k8s.config.new_client_from_config(os.environ["KUBECONFIG"]))


def job_sets(namespace: str) -> dict[str, Any]:
    items = objects().list_namespaced_custom_object(namespace=namespace, **JOBSETS)["items"]
    return {item["metadata"]["name"]: item for item in items}


def config_maps(namespace: str) -> dict[str, Any]:
    items = core().list_namespaced_config_map(namespace).items
    return {item.metadata.name: item for item in items if item.metadata.name != "kube-root-ca.crt"}


def finish_job_set(namespace: str, name: str, condition: str, message: str, code: int, reason: str = "Error") -> None:
    """Act as JobSet controller and kubelet: create a terminated pod, and set the condition of the JobSet."""
    labels = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/job-index": "0"}
    template = job_sets(namespace)[name]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    pod = {"metadata": {"name": f"{name}-w-0-0-abcde", "labels": labels}, "spec": template["spec"]}
    core().create_namespaced_pod(namespace, pod)
    terminated = {"exitCode": code, "reason": reason, "message": message}
    container = {"name": "worker", "state": {"terminated": terminated}, "ready": False, "restartCount": 0}
    container |= {"image": "x", "imageID": "x"}
    phase = "Failed" if code else "Succeeded"
    pod_status = {"status": {"phase": phase, "containerStatuses": [container]}}
    core().patch_namespaced_pod_status(f"{name}-w-0-0-abcde", namespace, pod_status)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = {"type": condition, "status": "True", "reason": condition, "message": "x", "lastTransitionTime": now}
    objects().patch_namespaced_custom_object_status(
        namespace=namespace, name=name, body={"status": {"conditions": [state]}}, **JOBSETS
    )


def test_a_job_is_submitted_once_and_leaves_nothing_behind(namespace: str, tmp_path: Path) -> None:
    """A controller that died between the two objects is completed by the next; stopping removes both objects."""
    settings = dataclasses.replace(SETTINGS, namespace=namespace, nodes=2, queue="team")
    jobs = GkeJobs(settings, SweepContext(tmp_path / "lr", tuple(CHOICES), None))
    trial = Trial(0, "0", ())
    jobs.prepare(trial)
    assert jobs.find_active(trial) is None and jobs.find_started(trial) is None
    (job,) = jobs.start([trial])
    ((name, job_set),) = job_sets(namespace).items()
    uid = job_set["metadata"]["uid"]
    description = jobs._describe(trial, jobs._compose(trial))
    # The server drops unknown fields, so equality means that all fields are known.
    assert job_set["spec"] == job_set_manifest(settings, description)["spec"]
    config_map = config_maps(namespace)[name]
    assert [owner.uid for owner in config_map.metadata.owner_references] == [uid]
    assert config_map.data == config_map_manifest(settings, description, None)["data"] and config_map.immutable
    assert jobs.is_running(job) and jobs.state(job) == "waits for its pods"
    core().delete_namespaced_config_map(name, namespace)
    again = GkeJobs(settings, SweepContext(tmp_path / "lr", tuple(CHOICES), None))
    assert again.find_active(trial) is not None
    again.start([trial])
    assert job_sets(namespace)[name]["metadata"]["uid"] == uid
    assert [owner.uid for owner in config_maps(namespace)[name].metadata.owner_references] == [uid]
    again.stop([job])
    wait_for(lambda: not job_sets(namespace) and not config_maps(namespace))
    wait_for(lambda: not again.is_running(job))
    assert job.status() == "preempted"


def test_a_detached_sweep_is_monitored_and_resumed(namespace: str, server: Server, tmp_path: Path) -> None:
    """Submitted by one command, monitored by another: one job finishes, one fails, is retried, is cancelled."""
    options = {"namespace": namespace, "image": SETTINGS.image, "outputs": SETTINGS.outputs, "detach": "true"}
    launcher = ["hydra/launcher=gke", *(f"hydra.launcher.{key}={value}" for key, value in options.items())]
    command = ["-m", *CHOICES, *launcher, "run.seed=1,2", "run.name=s"]
    cli.run_ok(*command, cwd=tmp_path, KUBECONFIG=str(server.kubeconfig))
    first, second = sorted(job_sets(namespace))
    plan = read_plan(tmp_path / "outputs" / "s")
    assert [line for line in status(plan) if "not started  waits for its pods" in line]
    finish_job_set(namespace, first, "Completed", json.dumps(FINISHED), 0)
    output: list[str] = []
    controller = threading.Thread(target=resume_sweep, args=(plan, output.append))
    controller.start()
    wait_for(lambda: "job 1: found running" in output)
    finish_job_set(namespace, second, "Failed", "Killed\n", 137, reason="OOMKilled")
    controller.join(240)
    assert output[-1].startswith("1 finished, 1 failed\n")
    assert any("OOMKilled, exit code 137" in line and "(Failed)" in line for line in output)
    run = RunDirectory(tmp_path / "outputs" / "s" / "0_seed=1", writes=False)
    assert (run.read()["objective"]["value"], run.read()["status"]) == (2.5, "finished")
    before = job_sets(namespace)
    core().delete_collection_namespaced_pod(namespace, grace_period_seconds=0)
    resume_sweep(plan, output.append, detach=True)
    after = job_sets(namespace)
    assert after[first]["metadata"]["uid"] == before[first]["metadata"]["uid"]
    assert after[second]["metadata"]["uid"] != before[second]["metadata"]["uid"]
    cancel(plan, output.append)
    assert "1 jobs were asked to stop" in output[-1]
    wait_for(lambda: list(job_sets(namespace)) == [first] == list(config_maps(namespace)))


def test_api_errors_are_one_line(namespace: str, tmp_path: Path) -> None:
    """Missing permissions, unknown namespaces and contexts, invalid names, exceeded quota."""
    trial, sweep = Trial(0, "0", ()), SweepContext(tmp_path / "s", tuple(CHOICES), None)
    GkeJobs(SETTINGS, sweep).prepare(trial)

    def start_error(**settings: Any) -> str:
        jobs = GkeJobs(dataclasses.replace(SETTINGS, **{"namespace": namespace, **settings}), sweep)
        with pytest.raises(ConfigError) as caught:
            jobs.start([trial])
        (problem,) = caught.value.problems
        assert "\n" not in problem.reason
        return str(problem)

    message = start_error(context="unprivileged")
    assert 'User "unprivileged" cannot create resource "jobsets"' in message and "docs/launch.md" in message
    assert "namespace=nowhere" in start_error(namespace="nowhere")
    assert "does not select a cluster" in start_error(context="elsewhere")
    assert "is invalid" in start_error(prefix="Not_A_Name") and not job_sets(namespace)
    quota = {"hard": {"count/configmaps": "0"}}
    core().create_namespaced_resource_quota(namespace, {"metadata": {"name": "team"}, "spec": quota})
    core().patch_namespaced_resource_quota_status(
        "team", namespace, {"status": {**quota, "used": {"count/configmaps": "0"}}}
    )
    message = start_error()
    assert "exceeded quota: team" in message and "hydra.launcher.queue" in message
    # The JobSet is deleted again if its ConfigMap cannot be created.
    wait_for(lambda: not job_sets(namespace))
