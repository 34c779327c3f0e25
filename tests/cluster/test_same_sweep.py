"""One sweep on this machine, on SLURM and on Kubernetes: the same command, bitwise equal results."""

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import cli, compile_cache, fork_server, slurm
from tests.support.jobset import DEFINITION
from tests.support.kube import Server, missing, serving
from tests.support.kubelet import Kubelet
from tests.support.polling import wait_for
from tests.support.programs import SEARCH_WORKER, write_program
from tests.support.skips import import_optional

k8s = import_optional("kubernetes", extra="gke")
import_optional("optuna", extra="sweep")

MISSING = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

SWEEP = [*cli.SMALL, "hardware=cpu", "train.steps=4", "train.log_every=1", "run.seed=1,2", "run.name=same"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("kube") / "cluster", DEFINITION) as running_server:
        yield running_server


@pytest.fixture
def launcher(server: Server, tmp_path: Path) -> Iterator[list[str]]:
    """Overrides that select a new namespace, in which a simulated kubelet runs the pods."""
    namespace = f"test-{secrets.token_hex(4)}"
    core(server).create_namespace({"metadata": {"name": namespace}})
    python = str(fork_server.write_python(compile_cache.PREFIX))
    kubelet = Kubelet(server, namespace, tmp_path / "pods", python=python, environment=cli.environment())
    with kubelet.running():
        options = {"namespace": namespace, "image": "registry.example/maxhydra:1"}
        yield ["-m", "hydra/launcher=gke", *(f"hydra.launcher.{key}={value}" for key, value in options.items())]


def core(server: Server) -> Any:
    return k8s.client.CoreV1Api(k8s.config.new_client_from_config(str(server.kubeconfig)))


def results(folder: Path) -> dict[str, tuple[dict[int, float], float]]:
    """Losses by step and objective of each job."""
    runs = sorted(path.parent for path in (folder / "outputs" / "same").glob("*/run.json"))
    assert all(cli.facts(run)["status"] == "finished" for run in runs)
    return {run.name: (cli.losses(run), cli.facts(run)["objective"]["value"]) for run in runs}


@pytest.mark.exhaustive
def test_the_same_sweep_has_the_same_results_everywhere(
    server: Server, launcher: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """JobSets keep their outputs in the pod, plain Jobs on the node; both come back through log and pod status."""
    slurm.require()
    places = {name: tmp_path_factory.mktemp(name) for name in ("local", "slurm", "jobset", "job")}
    cli.run_ok("-m", "hydra/launcher=local", *SWEEP, cwd=places["local"])
    with slurm.cluster(tmp_path_factory.mktemp("cluster")) as scheduler:
        options = ["-m", "hydra/launcher=slurm", "hydra.launcher.poll_seconds=1"]
        cli.run_ok(*options, *SWEEP, cwd=places["slurm"], **scheduler)
    kubeconfig = {"KUBECONFIG": str(server.kubeconfig)}
    outputs = {"jobset": "empty://", "job": f"host://{places['job']}/host"}
    for workload, volume in outputs.items():
        options = [f"hydra.launcher.workload={workload}", f"hydra.launcher.outputs={volume}"]
        cli.run_ok(*launcher, *options, *SWEEP, cwd=places[workload], **kubeconfig)
    expected = results(places["local"])
    assert list(expected) == ["0_seed=1", "1_seed=2"] and all(len(losses) == 4 for losses, _ in expected.values())
    assert expected["0_seed=1"] != expected["1_seed=2"]
    for place in ("slurm", "jobset", "job"):
        assert results(places[place]) == expected, place
    on_node = places["job"] / "host" / "same" / "0_seed=1"
    assert cli.losses(on_node) == expected["0_seed=1"][0] and (on_node / "checkpoints").is_dir()
    log = cli.run_ok("launch", "logs", "same/0", cwd=places["jobset"], **kubeconfig).stdout
    assert "finished" in log and "maxhydra.metrics" not in log
    followed = cli.run_ok("launch", "logs", "same/0", "-f", cwd=places["jobset"], **kubeconfig).stdout
    assert followed == log


@pytest.mark.exhaustive
def test_a_search_prunes_bad_jobs(server: Server, launcher: list[str], tmp_path: Path) -> None:
    """Metrics reach the pruner through the log of the pods, whose folders are not visible here."""
    worker = write_program(tmp_path / "worker", sys.executable, SEARCH_WORKER)
    search = ["hydra/sweeper=optuna", "hydra.sweeper.sampler=grid", "hydra.sweeper.workers=2"]
    search += ["hydra.sweeper.pruner=asha", "optimizer.learning_rate=0.3,0.5,1,2", "run.name=search", "hardware=cpu"]
    options = [f"hydra.launcher.command=[{worker},-m,maxhydra]", "hydra.launcher.outputs=empty://"]
    done = cli.run_ok(*launcher, *options, *search, cwd=tmp_path, KUBECONFIG=str(server.kubeconfig)).stdout
    runs = sorted((tmp_path / "outputs" / "search").glob("[0-9]_*"))
    statuses = [cli.facts(path)["status"] for path in runs]
    pruned = statuses.count("pruned")
    assert pruned >= 1 and statuses.count("finished") == 4 - pruned, done
    assert f"{4 - pruned} finished, {pruned} pruned" in done and "optimizer.learning_rate=0.3" in done
    wait_for(lambda: not [pod for pod in core(server).list_pod_for_all_namespaces().items if is_running(pod)])


def is_running(pod: Any) -> bool:
    return bool(pod.status.phase == "Running")
