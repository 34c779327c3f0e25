"""Jobs on Kubernetes without a cluster: rejected settings, rendered manifests, and returned results."""

import base64
import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxhydra.cli import main
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware
from maxhydra.launch.gke import GkeSettings
from maxhydra.launch.gke.api_errors import api_error
from maxhydra.launch.gke.cluster import Cluster
from maxhydra.launch.gke.code import read_changes
from maxhydra.launch.gke.manifests import (
    WORKLOADS,
    JobDescription,
    config_map_manifest,
    job_manifest,
    job_name,
    job_set_manifest,
    job_template,
    sweep_id,
    to_yaml,
)
from maxhydra.launch.gke.placement import choose_placement
from maxhydra.launch.gke.pods import describe_progress, leader_pod, run_result
from maxhydra.launch.job_spec import (
    LIMIT,
    decode_message,
    encode_message,
    remove_relayed_run,
    write_relayed_run,
    write_termination_message,
)
from maxhydra.launch.registry import launcher_from_json
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics
from maxhydra.record.metrics import append_streamed_rows
from maxhydra.record.provenance import image_revision
from maxhydra.runs import write_report
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import rerun_arguments, rerun_command
from maxhydra.runtime.detect import hardware_options
from tests.support import cli
from tests.support.skips import import_optional

kubernetes_validate = import_optional("kubernetes_validate", extra="test")
jobset = import_optional("kubeflow_trainer_api.models.jobset_v1alpha2_job_set", extra="test")
k8s = import_optional("kubernetes.client", extra="gke")


GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
IMAGE, BUCKET = "us-docker.pkg.dev/project/repository/maxhydra:1", "gs://bucket/runs"
BASE = GkeSettings(image=IMAGE, outputs=BUCKET)
TPU = dataclasses.replace(BASE, topology="4x8", slices=2, queue="team", service_account="trainer", max_restarts=5)
GPU = dataclasses.replace(
    BASE,
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
# Each GPU network with an accelerator that has it.
NETWORKED = {"tcpx": "nvidia-h100-80gb", "tcpxo": "nvidia-h100-mega-80gb", "rdma": "nvidia-b200"}


def describe(settings: GkeSettings, hardware: Hardware) -> JobDescription:
    sweep = "lr-0a1b2c"
    files = {"job.yaml": "task:\n  name: pretrain\n", "job.json": '{"choices": {}}\n'}
    placement = choose_placement(settings, hardware)
    return JobDescription(job_name(settings.prefix, sweep, 3), sweep, 3, "lr/3_learning_rate=0.01", files, placement)


def problems(**settings: Any) -> dict[str, str]:
    """Path -> reason."""
    return {problem.path: problem.reason for problem in dataclasses.replace(BASE, **settings).problems()}


@pytest.mark.parametrize("name", CASES)
def test_manifests_match_the_golden_files(name: str) -> None:
    settings, option = CASES[name]
    description = describe(settings, hardware_options()[option])
    manifests = [job_set_manifest(settings, description), config_map_manifest(settings, description, owner="1234")]
    assert to_yaml(manifests) == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_manifests_are_valid(name: str) -> None:
    """ConfigMap and Job are checked by the Kubernetes schemas, the JobSet by models generated from its schema."""
    settings, option = CASES[name]
    description = describe(settings, hardware_options()[option])
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job_template(settings, description)}
    for manifest in (job, config_map_manifest(settings, description, owner="1234")):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    manifest = job_set_manifest(settings, description)
    # The model drops unknown fields, so equality means that all fields are known.
    assert jobset.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest


def gpu_nodes(accelerator: str | None) -> Hardware:
    hardware = hardware_options()["gpu-h100"]
    return dataclasses.replace(hardware, gke=dataclasses.replace(hardware.gke, accelerator=accelerator))


def check_job(settings: GkeSettings, description: JobDescription) -> dict[str, Any]:
    """Validate a plain Job, and the template of a JobSet, by the Kubernetes schema; returns the pod template."""
    template = job_template(settings, description)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
    for manifest in (job, job_manifest(settings, description)):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    return template["spec"]["template"]


@pytest.mark.parametrize("network, accelerator", NETWORKED.items())
def test_gpu_networks(network: str, accelerator: str) -> None:
    """Every mounted volume exists, interfaces are valid JSON, and a variable of the user keeps its value."""
    settings = dataclasses.replace(BASE, nodes=2, network=network, env={"LD_LIBRARY_PATH": "/own"})
    template = check_job(settings, describe(settings, gpu_nodes(accelerator)))
    (worker,), sidecars = template["spec"]["containers"], template["spec"].get("initContainers", [])
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert all(mount["name"] in volumes for item in (worker, *sidecars) for mount in item["volumeMounts"])
    interfaces = json.loads(template["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert len(interfaces) == {"tcpx": 5, "tcpxo": 9, "rdma": 9}[network]
    assert [item["name"] for item in sidecars] == ([] if network == "rdma" else [f"{network}-daemon"])
    assert all(item["restartPolicy"] == "Always" for item in sidecars)
    assert [entry["value"] for entry in worker["env"] if entry["name"] == "LD_LIBRARY_PATH"] == ["/own"]
    assert worker["command"][-5:-3] == ["maxhydra", "job"]
    nodes = gpu_nodes("nvidia-tesla-t4")
    with pytest.raises(ConfigError, match=rf"(?s)has no network {network} on GKE.*{accelerator}"):
        choose_placement(settings, nodes)
    with pytest.raises(ConfigError, match="must be a whole node"):
        choose_placement(dataclasses.replace(settings, chips_per_node=4), gpu_nodes(accelerator))


def test_clusters_other_than_gke() -> None:
    """null removes node labels, and a patch changes anything else of the pods; a plain Job needs no JobSet."""
    patch = {
        "metadata": {"labels": {"team": "ml"}, "annotations": {"maxhydra/run": None}},
        "spec": {
            "nodeSelector": {"gpu": "a100"},
            "containers": [
                {"name": "worker", "env": [{"name": "A", "value": "2"}], "resources": {"limits": {"rdma/ib": "1"}}},
                {"name": "helper", "image": "busybox"},
            ],
            "tolerations": [{"operator": "Exists"}],
        },
    }
    settings = dataclasses.replace(
        BASE, node_selector=None, env={"A": "1", "B": "1"}, pod_patch=patch, workload="job", outputs="pvc://x",
        secrets=("all", "WANDB_API_KEY=wandb/key"),
    )  # fmt: skip
    assert not list(settings.problems())
    template = check_job(settings, describe(settings, gpu_nodes(None)))
    worker, helper = template["spec"]["containers"]
    assert template["spec"]["nodeSelector"] == {"gpu": "a100"} and helper["image"] == "busybox"
    assert template["metadata"]["labels"]["team"] == "ml" and not template["metadata"]["annotations"]
    assert template["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "1"}
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in worker["env"]}
    assert (env["A"], env["B"]) == ("2", "1")
    assert env["WANDB_API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "key"}}
    assert worker["envFrom"] == [{"secretRef": {"name": "all"}}]
    label = "cloud.google.com/gke-accelerator"
    partly = dataclasses.replace(BASE, node_selector={label: None, "pool": "a"})
    assert choose_placement(partly, gpu_nodes(None)).selector == {"pool": "a"}
    with pytest.raises(ConfigError, match="node_selector=null"):
        choose_placement(BASE, gpu_nodes(None))
    with pytest.raises(ConfigError, match="runs one process, but the job has several"):
        choose_placement(dataclasses.replace(settings, nodes=2), gpu_nodes(None))


def test_invalid_patches_and_references() -> None:
    assert problems(pod_patch={"spec": [], "status": {}}) and problems(pod_patch=[])
    assert problems(pod_patch={"spec": {"containers": [{"image": "x"}]}})
    secret = {"spec": {"containers": [{"name": "worker", "env": [{"name": "HF_TOKEN", "value": "abc123"}]}]}}
    (path,) = problems(pod_patch=secret)
    assert path == "hydra.launcher.pod_patch.spec.containers.env.HF_TOKEN"
    assert problems(secrets=("A=b",)) and problems(secrets=("1A=b/c",)) and not problems(secrets=("A=b/c.d",))
    assert problems(network="ib", workload="pod", code="a b").keys() == {
        f"hydra.launcher.{name}" for name in ("network", "workload", "code")
    }


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_changes_to_the_code_reach_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed, uncommitted, untracked, deleted and binary files; the init script runs with its folders moved."""
    checkout, image, code, config = (tmp_path / name for name in ("checkout", "image", "code", "config"))
    for folder in (checkout, code, config):
        folder.mkdir()
    git(checkout, "init", "-q")
    (checkout / "a.py").write_text("A = 1\n")
    (checkout / "gone.py").write_text("x\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    built = git(checkout, "rev-parse", "HEAD")
    shutil.copytree(checkout, image, ignore=shutil.ignore_patterns(".git"))
    (image / "REVISION").write_text(f"{built}\n")
    (checkout / ".gitignore").write_text("*.log\n")
    (checkout / "run.log").write_text("x")
    git(checkout, "add", ".gitignore")
    git(checkout, "commit", "-qm", "second")
    (checkout / "a.py").write_text("A = 2\n")
    (checkout / "new.bin").write_bytes(bytes(range(256)))
    (checkout / "gone.py").unlink()
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_a.py").write_text("x\n")
    before = git(checkout, "status", "--porcelain")
    changes = read_changes(built, checkout)
    assert git(checkout, "status", "--porcelain") == before and changes == read_changes(built, checkout)
    settings = dataclasses.replace(BASE, code="HEAD", workload="job")
    description = dataclasses.replace(describe(settings, hardware_options()["cpu"]), code=changes)
    template = check_job(settings, description)
    manifest = config_map_manifest(settings, description, owner="1234")
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    (config / "code.patch.gz").write_bytes(base64.b64decode(manifest["binaryData"]["code.patch.gz"]))
    ((_, _, script),) = (item["command"] for item in template["spec"]["initContainers"])
    folders = {"/opt/maxhydra": image, "/etc/maxhydra": config, "/code": code, "/tmp/code.patch": tmp_path / "patch"}
    pattern = "|".join(sorted(folders, key=len, reverse=True))
    script = re.sub(rf"(?<=[ (])(?:{pattern})", lambda match: str(folders[match[0]]), script)
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (code / "a.py").read_text() == "A = 2\n" and (code / "new.bin").read_bytes() == bytes(range(256))
    assert not any((code / name).exists() for name in ("gone.py", "run.log", "tests"))
    patched, original, unknown = (image_revision(folder) for folder in (code, image, tmp_path))
    assert patched is not None and (patched["sha"], patched["dirty"]) == (built, True)
    assert original is not None and not original["dirty"] and unknown is None
    (image / "REVISION").write_text("other\n")
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and f"revision 'other', but the changes are relative to {built}" in done.stderr
    monkeypatch.setattr("maxhydra.launch.gke.code.LIMIT", 100)
    with pytest.raises(ConfigError, match="more than a ConfigMap can hold"):
        read_changes(built, checkout)
    with pytest.raises(ConfigError, match="a revision of the git checkout"):
        read_changes("nowhere", checkout)
    (checkout / "a.py").write_text(f'API_KEY = "{"x7Kp" * 8}"\n')
    with pytest.raises(ConfigError, match="looks like a secret"):
        read_changes(built, checkout)


def test_metrics_are_read_from_the_output_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row once, although the log is read again and again, and a restarted job repeats steps."""
    monkeypatch.setenv("MAXHYDRA_METRICS_STREAM", "1")
    remote, local = MetricsWriter(tmp_path / "remote.jsonl"), tmp_path / "local" / "metrics.jsonl"
    for step in (1, 2):
        remote.write(step, {"loss": 1 / step})
    remote.write(2, {"eval/loss": float("nan")})
    output = f"starting\n{capsys.readouterr().out}"
    for text in (output[:-5], output, output):
        append_streamed_rows(local, text)
    assert local.read_text() == (tmp_path / "remote.jsonl").read_text()
    remote.write(1, {"loss": 9.0})
    remote.write(3, {"loss": 0.2})
    append_streamed_rows(local, capsys.readouterr().out)
    assert [row["step"] for row in read_metrics(local)] == [1, 2, 2, 3]
    result = {"status": "finished", "reason": "done", "end_step": 3, "metrics": {"loss": 0.2, "eval/loss": 0.5}}
    write_relayed_run(local.parent, result, "")
    assert read_metrics(local)[-1] == {"step": 3, "eval/loss": 0.5} and len(read_metrics(local)) == 5


def test_all_invalid_settings_are_reported_at_once() -> None:
    assert problems() == {}
    assert launcher_from_json(json.loads(json.dumps(GPU.to_json()))) == GPU
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
    paths = [problem.path.removeprefix("hydra.launcher.") for problem in wrong.problems()]
    assert set(paths) == {
        *("outputs", "image", "namespace", "topology", "slices", "max_restarts", "ttl_seconds", "memory", "queue"),
        *("prefix", "secrets", "env", "env.WANDB_API_KEY", "volumes", "volumes./x", "volumes./y"),
        *("tolerations", "node_selector", "command"),
    }
    assert paths.count("volumes") == 2
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
    """Matches GKE's table of TPU machine types."""
    placement = choose_placement(dataclasses.replace(BASE, topology=topology), hardware_options()[option])
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
def test_invalid_placements_are_rejected(option: str, settings: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_placement(dataclasses.replace(BASE, **settings), hardware_options()[option])
    assert [problem.path for problem in caught.value.problems] == paths


def test_every_accelerator_option_has_a_gke_accelerator() -> None:
    options = {name: option for name, option in hardware_options().items() if option.platform.value in ("tpu", "gpu")}
    assert options and all(option.gke.accelerator for option in options.values())


def test_names_are_short_enough_for_any_sweep_name() -> None:
    """A pod's name is its JobSet's, `-w`, two indices and five characters: 63 in total."""
    for folder in ("/outputs/lr", "/outputs/" + "Ünïcode_and__very_long" * 5, "/outputs/---", "/x/2026-11-15"):
        name = job_name("maxhydra-tests1", sweep_id(Path(folder)), 99999)
        assert len(f"{name}-w-99-9999-abcde") <= 63
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}, kubernetes_validate.latest_version()
        )
        assert name == name.strip("-").lower() and name.isascii() and "--" not in name.replace("maxhydra-", "")
    assert sweep_id(Path("/a/lr")) != sweep_id(Path("/b/lr"))


@pytest.mark.parametrize(
    "status, message, path, hint",
    [
        (403, 'jobsets.jobset.x-k8s.io is forbidden: User "x" cannot create resource', "namespace", "Role"),
        (403, 'configmaps "x" is forbidden: exceeded quota: team', "namespace", "queue"),
        (404, 'namespaces "x" not found', "namespace", "kubectl get namespaces"),
        (401, "Unauthorized", "context", "gcloud auth login"),
        (422, 'JobSet "x" is invalid', "", "launch render"),
        (409, "already exists", "", "get jobsets"),
    ],
)
def test_api_errors_have_a_hint(status: int, message: str, path: str, hint: str) -> None:
    error = api_error("JobSet x", status=status, message=message, server="https://cluster", namespace="team")
    (problem,) = error.problems
    assert problem.path == f"hydra.launcher.{path}".rstrip(".")
    assert message in problem.reason and "https://cluster" in problem.reason and hint in problem.hint
    assert not error.is_transient


@pytest.mark.slow
def test_a_run_is_restored_from_its_termination_message(tmp_path: Path) -> None:
    """The least useful keys are dropped until the message fits; the result reads like any other run."""
    remote = RunDirectory(tmp_path / "pod" / "lr")
    facts = {"task": "pretrain", "choices": {"model": "tiny"}, "tags": [], "notes": ""}
    with remote.session("train:\n  steps: 7\n", facts):
        remote.update(packages={f"package-{number}": "1.2.3" for number in range(300)})
        metrics = {"eval/loss": 2.5, "loss": float("nan")}
        remote.finish("finished", "done", objective={"name": "eval/loss", "value": 2.5}, metrics=metrics, end_step=7)
    text = encode_message(remote.read())
    assert len(text.encode()) <= LIMIT < remote.facts_path.stat().st_size
    message = decode_message(text)
    assert message is not None and "packages" not in message
    local = tmp_path / "outputs" / "lr" / "0"
    write_relayed_run(local, message, "train:\n  steps: 7\n")
    assert read_metrics(local / "metrics.jsonl") == [{"step": 7, "eval/loss": 2.5}]
    (run,) = Registry(tmp_path / "outputs").runs()
    assert (run.status, run.value) == ("finished", 2.5)
    huge = {"status": "failed", "reason": "x" * 9000, "metrics": {f"m{i}": 1.0 for i in range(900)}}
    assert len(encode_message(huge).encode()) <= LIMIT
    # A long compiler error is also in the session, and notes can have any length.
    sessions = remote.read()["sessions"]
    for fact in ({"notes": "x" * 9000}, {"tags": ["x" * 90] * 90}, {"lines": [{"x": "y" * 90}] * 90}):
        reason = "é" * 9000
        facts = {**remote.read(), **fact, "reason": reason, "sessions": [{**sessions[0], "reason": reason}]}
        assert len(encode_message(facts).encode()) <= LIMIT
        reduced = decode_message(encode_message(facts))
        assert reduced is not None
        assert reduced["status"] == "finished" and reduced["reason"].startswith("éé")
        assert reduced["objective"]["value"] == 2.5
        write_relayed_run(tmp_path / "short", reduced, "")
        assert write_report(RunDirectory(tmp_path / "short", writes=False)).is_file()
    # A job that did not start has no session.
    short = decode_message(encode_message({"status": "failed", "reason": "OOMKilled"}))
    assert short is not None
    write_relayed_run(local, short, "")
    (run,) = Registry(tmp_path / "outputs").runs()
    assert run.status == "failed" and RunDirectory(local, writes=False).read()["reason"] == "OOMKilled"
    # A rerun uses the overrides of the job, never the defaults.
    facts = RunDirectory(local, writes=False).read()
    with pytest.raises(ConfigError, match="has no overrides"):
        rerun_arguments(facts, None)
    assert rerun_command(facts).startswith("cd ")
    (local / "job.json").write_text(json.dumps({"choices": {}, "overrides": ["run.seed=7"], "config_dir": None}))
    write_relayed_run(local, short, "")
    assert rerun_arguments(RunDirectory(local, writes=False).read(), None) == ["run.seed=7"]
    assert rerun_command(RunDirectory(local, writes=False).read()).endswith("maxhydra run.seed=7")
    remove_relayed_run(local)
    assert not Registry(tmp_path / "outputs").runs() and not (local / "metrics.jsonl").exists()
    remove_relayed_run(remote.path)
    assert remote.exists()
    assert decode_message("Traceback") is None and decode_message("[1]") is None and decode_message(None) is None


def test_every_exit_writes_a_termination_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAXHYDRA_TERMINATION_LOG", str(tmp_path / "log"))
    ends = {None: "finished", SystemExit(143): "failed", ConfigError(Problem("a", "is wrong")): "failed"}
    for error, status in ends.items():
        with contextlib.suppress(BaseException), write_termination_message(tmp_path / "run"):
            if error is not None:
                raise error
        message = decode_message((tmp_path / "log").read_text())
        assert message is not None and message["status"] == status


def render(capsys: pytest.CaptureFixture[str], *rerun_arguments: str) -> tuple[int, str]:
    """Exit code and output of `maxhydra launch render`."""
    code = main.run(["launch", "render", *rerun_arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.slow
def test_render_rejects_what_a_launch_rejects(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = render(capsys, "hydra/launcher=gke", "hydra.launcher.slices=0", "hydra.launcher.namespace=No_Name")
    assert code == 2 and "4 problems" in output
    code, output = render(capsys, *LAUNCHER, "hardware=cpu", "train.step=3")
    assert code == 2 and "train.step" in output
    code, output = render(capsys, *LAUNCHER, "hardware=cpu", "hydra.launcher.slice=3")
    assert code == 2 and "did you mean 'slices'?" in output
    code, output = render(capsys, *LAUNCHER, "hardware=auto")
    assert code == 2 and "must name the hardware, because it selects the nodes" in output


@pytest.mark.slow
def test_the_worker_runs_the_files_of_the_config_map(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rendered, extracted as a pod would see it, run, and reported through the termination message."""
    folder = f"run.outputs={tmp_path / 'outputs'}"
    short = ["train.steps=2", "run.name=lr", "run.seed=1,2", folder]
    code, text = render(capsys, *LAUNCHER, "hardware=cpu", *cli.SMALL, *short)
    assert code == 0 and not (tmp_path / "outputs").exists()
    manifests = list(yaml.safe_load_all(text))
    assert [manifest["kind"] for manifest in manifests] == ["JobSet", "ConfigMap"] * 2
    files = {tmp_path / name: content for name, content in manifests[1]["data"].items()}
    for path, content in files.items():
        path.write_text(content)
    pod = manifests[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    *start, _, run_dir = pod["containers"][0]["command"]
    assert start == ["python", "-m", "maxhydra", "job", "/etc/maxhydra/job.yaml"] and run_dir == "/outputs/lr/0_seed=1"
    variables = {"MAXHYDRA_TERMINATION_LOG": str(tmp_path / "termination-log")}
    command = ["job", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run")]
    cli.run_ok(*command, cwd=tmp_path, **variables)
    message = decode_message((tmp_path / "termination-log").read_text())
    assert message is not None and (message["status"], message["end_step"]) == ("finished", 2)
    assert message["objective"]["value"] == cli.facts(tmp_path / "run")["objective"]["value"]
    assert message["choices"]["hardware"] == "cpu" and "run.seed=1" in message["overrides"]
    (tmp_path / "job.yaml").write_text(files[tmp_path / "job.yaml"].replace("steps: 2", "steps: -2"))
    assert cli.run(*command, cwd=tmp_path, **variables).returncode == 2
    message = decode_message((tmp_path / "termination-log").read_text())
    assert message is not None and message["status"] == "failed" and "train.steps" in message["reason"]


@pytest.mark.slow
def test_an_unreachable_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing listening, an unknown context, an invalid kubeconfig, a missing kubeconfig."""
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    cluster = {"name": "unreachable", "cluster": {"server": "https://127.0.0.1:9"}}
    current = {"name": "here", "context": {"cluster": "unreachable", "user": "me"}}
    config = {"clusters": [cluster], "contexts": [current], "users": [{"name": "me", "user": {"token": "x"}}]}
    path.write_text(yaml.safe_dump({**config, "current-context": "here"}))

    def error(context: str | None) -> str:
        with pytest.raises(ConfigError) as caught:
            Cluster("default", context, WORKLOADS["jobset"]).workloads("x")
        (problem,) = caught.value.problems
        assert problem.path == "hydra.launcher.context" and problem.hint and "\n" not in problem.reason
        return problem.reason

    assert "https://127.0.0.1:9 does not respond" in error(None) and "Connection refused" in error(None)
    assert "elsewhere" in error("elsewhere")
    path.write_text("not: [a, config")
    assert "does not select a cluster" in error(None)
    path.unlink()
    assert "does not select a cluster" in error(None)


def make_pod(job: int, index: int, *, phase: str = "Running", **state: Any) -> k8s.V1Pod:
    """A pod as returned by the client, with its worker in the given state: terminated=..., waiting=..."""
    labels = {"jobset.sigs.k8s.io/job-index": str(job), "batch.kubernetes.io/job-completion-index": str(index)}
    worker = k8s.V1ContainerStatus(
        name="worker", image="", image_id="", ready=False, restart_count=0, state=k8s.V1ContainerState(**state)
    )
    status = k8s.V1PodStatus(phase=phase, container_statuses=[worker])
    return k8s.V1Pod(metadata=k8s.V1ObjectMeta(name=f"x-w-{job}-{index}", labels=labels), status=status)


def test_results_of_pods() -> None:
    """The first process reports the run's result; if it cannot, the failed pods are named."""
    message = json.dumps({"status": "failed", "reason": "loss is NaN"})
    killed = k8s.V1ContainerStateTerminated(exit_code=137, reason="OOMKilled", message="Killed\n")
    failed = k8s.V1ContainerStateTerminated(exit_code=1, reason="Error", message=message)
    pods = [make_pod(1, 0, terminated=killed), make_pod(0, 10), make_pod(0, 2, terminated=failed)]
    first = leader_pod(pods)
    assert first is not None and first.metadata.name == "x-w-0-2" and leader_pod([]) is None
    assert run_result(pods, ("Failed", "")) == {"status": "failed", "reason": "loss is NaN"}
    reason = run_result(pods[:2], ("Failed", "too many restarts"))["reason"]
    assert reason == "x-w-1-0: OOMKilled, exit code 137, Killed; too many restarts"
    assert run_result([], ("Completed", ""))["status"] == "finished"
    waiting = make_pod(0, 1, phase="Pending", waiting=k8s.V1ContainerStateWaiting(reason="ImagePullBackOff"))
    assert describe_progress([pods[1], waiting]) == "pods: 1 pending, 1 running (ImagePullBackOff)"
    assert describe_progress([]) == "waits for its pods"
