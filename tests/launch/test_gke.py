"""Jobs on Kubernetes without a cluster: what is refused, what would be sent, what comes back."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxhydra.cli import main
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware
from maxhydra.launch.gke import GkeSettings
from maxhydra.launch.gke.api_errors import refusal
from maxhydra.launch.gke.cluster import Cluster
from maxhydra.launch.gke.manifests import Work, config_map, job_name, job_set, job_template, sweep_id, to_yaml
from maxhydra.launch.gke.placement import place
from maxhydra.launch.gke.pods import ending, leader, progress
from maxhydra.launch.registry import read_launcher
from maxhydra.launch.termination import LIMIT, forget, message, read_message, relay, write_termination_message
from maxhydra.record import RunDirectory, read_metrics
from maxhydra.runs import write_report
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import arguments, rerun_command
from maxhydra.runtime.hardware_options import hardware_options
from tests.support import cli as running
from tests.support.skips import import_optional

kubernetes_validate = import_optional("kubernetes_validate", extra="test")
jobset = import_optional("kubeflow_trainer_api.models.jobset_v1alpha2_job_set", extra="test")
k8s = import_optional("kubernetes.client", extra="gke")


GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
IMAGE, BUCKET = "us-docker.pkg.dev/project/repository/maxhydra:1", "gs://bucket/runs"
GIVEN = GkeSettings(image=IMAGE, outputs=BUCKET)
TPU = dataclasses.replace(GIVEN, topology="4x8", slices=2, queue="team", service_account="trainer", max_restarts=5)
GPU = dataclasses.replace(
    GIVEN,
    namespace="research",
    nodes=2,
    slices=2,
    outputs="pvc://results/runs",
    volumes={"/data": "gs://texts", "/scratch": "empty://"},
    env={"NCCL_DEBUG": "INFO", "TRIES": 3},  # type: ignore[dict-item]
    secrets=("wandb",),
    tolerations=("team=ml:NoSchedule", "spot"),
    node_selector={"cloud.google.com/gke-spot": "true"},
    cpu="100",
    memory="800Gi",
    priority_class="high",
    ttl_seconds=None,
)
LAUNCHER = ["hydra/launcher=gke", f"hydra.launcher.image={IMAGE}", f"hydra.launcher.outputs={BUCKET}"]
CASES = {"gke_tpu": (TPU, "tpu-v5e"), "gke_gpu": (GPU, "gpu-h100")}


def work_of(settings: GkeSettings, hardware: Hardware) -> Work:
    sweep = "lr-0a1b2c"
    files = {"job.yaml": "task:\n  name: pretrain\n", "job.json": '{"choices": {}}\n'}
    placement = place(settings, hardware)
    return Work(job_name(settings.prefix, sweep, 3), sweep, 3, "lr/3_learning_rate=0.01", files, placement)


def problems(**settings: Any) -> dict[str, str]:
    """Path -> reason."""
    return {problem.path: problem.reason for problem in dataclasses.replace(GIVEN, **settings).problems()}


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_those_on_file(name: str) -> None:
    settings, option = CASES[name]
    work = work_of(settings, hardware_options()[option])
    rendered = to_yaml([job_set(settings, work), config_map(settings, work, owner="1234")])
    assert rendered == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_valid(name: str) -> None:
    """ConfigMap and Job by the schemas of Kubernetes, the JobSet by the models that its own schema was turned into."""
    settings, option = CASES[name]
    work = work_of(settings, hardware_options()[option])
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job_template(settings, work)}
    for manifest in (job, config_map(settings, work, owner="1234")):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    manifest = job_set(settings, work)
    # A field that the model does not know is not there afterwards.
    assert jobset.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest


def test_settings_are_checked_all_at_once() -> None:
    assert problems() == {}
    assert read_launcher(json.loads(json.dumps(GPU.told()))) == GPU
    wrong = GkeSettings(
        image="a b",
        namespace="Bad_Name",
        topology="4by4",
        slices=0,
        max_restarts=-1,
        ttl_seconds=-1,
        memory="much",
        queue="-x",
        prefix="9lives",
        secrets=("a_b",),
        env={"1X": "y", "WANDB_API_KEY": "k"},
        volumes={"data": "gs://bucket", "/outputs": "empty://", "/x": "ftp://y", "/y": "pvc://claim/../up"},
        tolerations=("a=b:Never",),
        node_selector={"/pool": "x"},
        command=(),
    )
    found = [problem.path.removeprefix("hydra.launcher.") for problem in wrong.problems()]
    assert set(found) == {
        *("outputs", "image", "namespace", "topology", "slices", "max_restarts", "ttl_seconds", "memory", "queue"),
        *("prefix", "secrets", "env", "env.WANDB_API_KEY", "volumes", "volumes./x", "volumes./y"),
        *("tolerations", "node_selector", "command"),
    }
    assert found.count("volumes") == 2
    assert problems(secrets="wandb", env=[], detach="yes").keys() == {
        f"hydra.launcher.{name}" for name in ("secrets", "env", "detach")
    }


@pytest.mark.parametrize(
    "option, topology, nodes, chips",
    [
        ("tpu-v5e", "1x1", 1, 1),
        ("tpu-v5e", "2x4", 1, 8),
        ("tpu-v5e", "16x16", 64, 4),
        ("tpu-v6e", "4x4", 4, 4),
        ("tpu-v4", "2x2x1", 1, 4),
        ("tpu-v5p", "4x4x8", 32, 4),
        ("tpu-v7", "2x2x2", 2, 4),
    ],
)
def test_nodes_of_a_slice(option: str, topology: str, nodes: int, chips: int) -> None:
    """As GKE's table of TPU machine types has them."""
    placement = place(dataclasses.replace(GIVEN, topology=topology), hardware_options()[option])
    assert (placement.nodes, placement.resources) == (nodes, {"google.com/tpu": chips})


@pytest.mark.parametrize(
    "option, settings, paths",
    [
        ("auto", {}, ["hardware"]),
        ("tpu-v5e", {"nodes": 2}, ["hydra.launcher.topology", "hydra.launcher.nodes"]),
        ("tpu-v5e", {"topology": "2x2x2"}, ["hydra.launcher.topology"]),
        ("tpu-v5p", {"topology": "3x3x1"}, ["hydra.launcher.topology"]),
        ("gpu-h100", {"topology": "4x4"}, ["hydra.launcher.topology"]),
        ("cpu", {"chips_per_node": 1}, ["hydra.launcher.chips_per_node"]),
        ("cpu", {"nodes": 2, "outputs": "empty://"}, ["hydra.launcher.outputs"]),
    ],
)
def test_nodes_that_do_not_exist(option: str, settings: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        place(dataclasses.replace(GIVEN, **settings), hardware_options()[option])
    assert [problem.path for problem in caught.value.problems] == paths


def test_every_chip_has_nodes() -> None:
    named = {name: option for name, option in hardware_options().items() if option.platform.value in ("tpu", "gpu")}
    assert named and all(option.gke.accelerator for option in named.values())


def test_names_are_short_enough_whatever_the_sweep_is_called() -> None:
    """A pod's name is its JobSet's, `-w`, two indices and five characters: 63 in all."""
    for folder in ("/outputs/lr", "/outputs/" + "Ünïcode_and__very_long" * 5, "/outputs/---", "/x/2026-11-15"):
        name = job_name("maxhydra-tests1", sweep_id(Path(folder)), 99999)
        assert len(f"{name}-w-99-9999-abcde") <= 63
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}, kubernetes_validate.latest_version()
        )
        assert name == name.strip("-").lower() and name.isascii() and "--" not in name.replace("maxhydra-", "")
    assert sweep_id(Path("/a/lr")) != sweep_id(Path("/b/lr"))


@pytest.mark.parametrize(
    "status, said, path, way_out",
    [
        (403, 'jobsets.jobset.x-k8s.io is forbidden: User "x" cannot create resource', "namespace", "Role"),
        (403, 'configmaps "x" is forbidden: exceeded quota: team', "namespace", "queue"),
        (404, 'namespaces "x" not found', "namespace", "kubectl get namespaces"),
        (401, "Unauthorized", "context", "gcloud auth login"),
        (422, 'JobSet "x" is invalid', "", "launch render"),
        (409, "already exists", "", "get jobsets"),
    ],
)
def test_refusals_say_the_way_out(status: int, said: str, path: str, way_out: str) -> None:
    error = refusal("JobSet x", status=status, said=said, by="https://cluster", namespace="team")
    (problem,) = error.problems
    assert problem.path == f"hydra.launcher.{path}".rstrip(".")
    assert said in problem.reason and "https://cluster" in problem.reason and way_out in problem.hint
    assert not error.is_passing


def test_a_run_comes_back_through_its_last_words(tmp_path: Path) -> None:
    """What does not fit is left out, the least useful first; what comes back is a run like any other."""
    there = RunDirectory(tmp_path / "pod" / "lr")
    facts = {"task": "pretrain", "choices": {"model": "tiny"}, "tags": [], "notes": ""}
    with there.session("train:\n  steps: 7\n", facts):
        there.update(packages={f"package-{number}": "1.2.3" for number in range(300)})
        metrics = {"eval/loss": 2.5, "loss": float("nan")}
        there.finish("finished", "done", objective={"name": "eval/loss", "value": 2.5}, metrics=metrics, end_step=7)
    text = message(there.read())
    assert len(text.encode()) <= LIMIT < there.facts_path.stat().st_size
    told = read_message(text)
    assert told is not None and "packages" not in told
    here = tmp_path / "outputs" / "lr" / "0"
    relay(here, told, "train:\n  steps: 7\n")
    assert read_metrics(here / "metrics.jsonl") == [{"step": 7, "eval/loss": 2.5}]
    (run,) = Registry(tmp_path / "outputs").runs()
    assert (run.status, run.value) == ("finished", 2.5)
    huge = {"status": "failed", "reason": "x" * 9000, "metrics": {f"m{i}": 1.0 for i in range(900)}}
    assert len(message(huge).encode()) <= LIMIT
    # The whole message of a compiler is in the session too, and a note may be of any length.
    sessions = there.read()["sessions"]
    for fact in ({"notes": "x" * 9000}, {"tags": ["x" * 90] * 90}, {"lines": [{"x": "y" * 90}] * 90}):
        words = "é" * 9000
        facts = {**there.read(), **fact, "reason": words, "sessions": [{**sessions[0], "reason": words}]}
        assert len(message(facts).encode()) <= LIMIT
        left = read_message(message(facts))
        assert left is not None
        assert left["status"] == "finished" and left["reason"].startswith("éé") and left["objective"]["value"] == 2.5
        relay(tmp_path / "short", left, "")
        assert write_report(RunDirectory(tmp_path / "short", writes=False)).is_file()
    # Of a job that did not begin, there is no session to tell of.
    short = read_message(message({"status": "failed", "reason": "OOMKilled"}))
    assert short is not None
    relay(here, short, "")
    (run,) = Registry(tmp_path / "outputs").runs()
    assert run.status == "failed" and RunDirectory(here, writes=False).read()["reason"] == "OOMKilled"
    # It is run again as it was asked for, not as a run of nothing but defaults.
    facts = RunDirectory(here, writes=False).read()
    with pytest.raises(ConfigError, match="does not say with which overrides"):
        arguments(facts, None)
    assert rerun_command(facts).startswith("cd ")
    (here / "job.json").write_text(json.dumps({"choices": {}, "overrides": ["run.seed=7"], "config_dir": None}))
    relay(here, short, "")
    assert arguments(RunDirectory(here, writes=False).read(), None) == ["run.seed=7"]
    assert rerun_command(RunDirectory(here, writes=False).read()).endswith("maxhydra run.seed=7")
    forget(here)
    assert not Registry(tmp_path / "outputs").runs() and not (here / "metrics.jsonl").exists()
    forget(there.path)
    assert there.exists()
    assert read_message("Traceback") is None and read_message("[1]") is None and read_message(None) is None


def test_every_end_has_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAXHYDRA_TERMINATION_LOG", str(tmp_path / "log"))
    ends = {None: "finished", SystemExit(143): "failed", ConfigError(Problem("a", "is wrong")): "failed"}
    for error, status in ends.items():
        with contextlib.suppress(BaseException), write_termination_message(tmp_path / "run"):
            if error is not None:
                raise error
        told = read_message((tmp_path / "log").read_text())
        assert told is not None and told["status"] == status


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of `maxhydra launch render`."""
    code = main.run(["launch", "render", *arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_render_refuses_what_a_launch_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = rendered(capsys, "hydra/launcher=gke", "hydra.launcher.slices=0", "hydra.launcher.namespace=No_Name")
    assert code == 2 and "4 problems" in said
    code, said = rendered(capsys, *LAUNCHER, "hardware=cpu", "train.step=3")
    assert code == 2 and "train.step" in said
    code, said = rendered(capsys, *LAUNCHER, "hardware=cpu", "hydra.launcher.slice=3")
    assert code == 2 and "did you mean 'slices'?" in said
    code, said = rendered(capsys, *LAUNCHER, "hardware=auto")
    assert code == 2 and "does not say which nodes to ask for" in said


def test_the_worker_runs_what_the_config_map_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rendered, taken out as a pod would see it, run, and told back through the termination log."""
    folder = f"run.outputs={tmp_path / 'outputs'}"
    short = ["train.steps=2", "run.name=lr", "run.seed=1,2", folder]
    code, text = rendered(capsys, *LAUNCHER, "hardware=cpu", *running.SMALL, *short)
    assert code == 0 and not (tmp_path / "outputs").exists()
    manifests = list(yaml.safe_load_all(text))
    assert [manifest["kind"] for manifest in manifests] == ["JobSet", "ConfigMap"] * 2
    files = {tmp_path / name: content for name, content in manifests[1]["data"].items()}
    for path, content in files.items():
        path.write_text(content)
    pod = manifests[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    *start, _, where = pod["containers"][0]["command"]
    assert start == ["python", "-m", "maxhydra", "job", "/etc/maxhydra/job.yaml"] and where == "/outputs/lr/0_seed=1"
    last_words = {"MAXHYDRA_TERMINATION_LOG": str(tmp_path / "termination-log")}
    command = ["job", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "there")]
    running.finished(*command, cwd=tmp_path, **last_words)
    told = read_message((tmp_path / "termination-log").read_text())
    assert told is not None and (told["status"], told["end_step"]) == ("finished", 2)
    assert told["objective"]["value"] == running.facts(tmp_path / "there")["objective"]["value"]
    assert told["choices"]["hardware"] == "cpu" and "run.seed=1" in told["overrides"]
    (tmp_path / "job.yaml").write_text(files[tmp_path / "job.yaml"].replace("steps: 2", "steps: -2"))
    assert running.run(*command, cwd=tmp_path, **last_words).returncode == 2
    told = read_message((tmp_path / "termination-log").read_text())
    assert told is not None and told["status"] == "failed" and "train.steps" in told["reason"]


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody listens, no such context, a file that is no kubeconfig, no file."""
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    nobody = {"name": "nobody", "cluster": {"server": "https://127.0.0.1:9"}}
    context = {"name": "here", "context": {"cluster": "nobody", "user": "me"}}
    config = {"clusters": [nobody], "contexts": [context], "users": [{"name": "me", "user": {"token": "x"}}]}
    path.write_text(yaml.safe_dump({**config, "current-context": "here"}))

    def refused(context: str | None) -> str:
        with pytest.raises(ConfigError) as caught:
            Cluster("default", context).job_sets("x")
        (problem,) = caught.value.problems
        assert problem.path == "hydra.launcher.context" and problem.hint and "\n" not in problem.reason
        return problem.reason

    assert "https://127.0.0.1:9 does not answer" in refused(None) and "Connection refused" in refused(None)
    assert "elsewhere" in refused("elsewhere")
    path.write_text("not: [a, config")
    assert "leads to no cluster" in refused(None)
    path.unlink()
    assert "leads to no cluster" in refused(None)


def pod_of(job: int, index: int, *, phase: str = "Running", **state: Any) -> k8s.V1Pod:
    """A pod as the client gives it, whose worker is in a state: terminated=..., waiting=..."""
    labels = {"jobset.sigs.k8s.io/job-index": str(job), "batch.kubernetes.io/job-completion-index": str(index)}
    worker = k8s.V1ContainerStatus(
        name="worker", image="", image_id="", ready=False, restart_count=0, state=k8s.V1ContainerState(**state)
    )
    status = k8s.V1PodStatus(phase=phase, container_statuses=[worker])
    return k8s.V1Pod(metadata=k8s.V1ObjectMeta(name=f"x-w-{job}-{index}", labels=labels), status=status)


def test_what_pods_say() -> None:
    """The first process speaks for the run; where it cannot, those that failed are named."""
    words = json.dumps({"status": "failed", "reason": "loss is NaN"})
    killed = k8s.V1ContainerStateTerminated(exit_code=137, reason="OOMKilled", message="Killed\n")
    told = k8s.V1ContainerStateTerminated(exit_code=1, reason="Error", message=words)
    pods = [pod_of(1, 0, terminated=killed), pod_of(0, 10), pod_of(0, 2, terminated=told)]
    first = leader(pods)
    assert first is not None and first.metadata.name == "x-w-0-2" and leader([]) is None
    assert ending(pods, ("Failed", "")) == {"status": "failed", "reason": "loss is NaN"}
    reason = ending(pods[:2], ("Failed", "too many restarts"))["reason"]
    assert reason == "x-w-1-0: OOMKilled, exit code 137, Killed; too many restarts"
    assert ending([], ("Completed", ""))["status"] == "finished"
    waiting = pod_of(0, 1, phase="Pending", waiting=k8s.V1ContainerStateWaiting(reason="ImagePullBackOff"))
    assert progress([pods[1], waiting]) == "pods: 1 pending, 1 running (ImagePullBackOff)"
    assert progress([]) == "waits for its pods"
