"""Runs in buckets (S3, GCS): killed during an upload, resumed here and on another host, listed, converted, decoded."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import find_composer
from maxhydra.record.storage import Store, complete_steps
from tests.support import cli
from tests.support.cli import SMALL, losses, parameter_hash
from tests.support.object_store import BUCKET, KEY, SECRET, GCSServer, S3Server

MODEL = [override for override in SMALL if override.startswith("model.")]
URL = f"s3://{BUCKET}/runs"
STEPS, EVERY = 60, 20
RUN = [*SMALL, f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "train.eval_batches=0"]
RUN += ["optimizer/schedule=constant"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    found = S3Server()
    found.create_bucket()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def connected(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients in this process find the server too; a test that failed leaves no faults behind."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    yield
    server.faults.share = server.faults.seconds = 0.0


class Host:
    """A host with its own working copies and cache."""

    def __init__(self, folder: Path, server: S3Server | GCSServer):
        self.folder, self._variables = folder, {**server.variables, "HOME": str(folder)}
        folder.mkdir()

    def run_ok(self, *arguments: str) -> str:
        done = cli.run_ok(*arguments, cwd=self.folder, **self._variables)
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> cli.fork_server.Command:
        return cli.start_silent(*arguments, cwd=self.folder, **self._variables)

    def working_copy(self, name: str, scheme: str = "s3") -> Path:
        return self.folder / ".cache" / "maxhydra" / "staging" / scheme / BUCKET / "runs" / name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in a local folder."""
    cwd = tmp_path_factory.mktemp("whole")
    cli.run_ok(*RUN, "run.name=whole", cwd=cwd)
    return cwd / "outputs" / "whole"


def stored_steps(name: str) -> list[int]:
    return list(complete_steps(Store(f"{URL}/{name}").find()))


def wait_for(condition: object, process: cli.fork_server.Command) -> None:
    deadline = time.monotonic() + 240
    while not condition() and process.is_running() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)


@pytest.mark.exhaustive
def test_a_run_killed_during_an_upload(server: S3Server, whole: Path, tmp_path: Path) -> None:
    """kill -9 between two objects of a checkpoint, with failing requests; the same weights, nothing lost."""
    faults, here = server.faults, Host(tmp_path / "here", server)
    arguments = [*RUN, "run.name=killed", f"run.outputs={URL}"]
    faults.share, faults.seconds = 0.05, 0.1
    process = here.start(*arguments)
    wait_for(lambda: any("/killed/checkpoints/" in path for path in faults.uploads), process)
    assert process.is_running()
    process.kill()
    process.wait()
    assert stored_steps("killed") == []
    faults.seconds = 0.0
    here.run_ok(*arguments)
    assert faults.failed > 0
    assert stored_steps("killed") == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    copy = here.working_copy("killed")
    assert losses(copy) == losses(whole)
    assert parameter_hash(copy, STEPS) == parameter_hash(whole, STEPS)
    store = Store(f"{URL}/killed")
    for name, item in store.find().items():
        content = store.read(name)
        assert len(content) == item.size and content == (copy / name).read_bytes(), name
        assert KEY.encode() not in content and SECRET.encode() not in content, name
    facts = json.loads(store.read("run.json"))
    assert [session["status"] for session in facts["sessions"]] == ["lost", "finished"]


@pytest.mark.exhaustive
def test_another_host_continues_from_the_store(server: S3Server, whole: Path, tmp_path: Path) -> None:
    """SIGTERM uploads the last checkpoint, whatever persist_every; another host resumes, lists, converts, decodes."""
    first, second = Host(tmp_path / "first", server), Host(tmp_path / "second", server)
    arguments = [*RUN, "run.name=moved", f"run.outputs={URL}", "checkpoint.persist_every=100000"]
    process = first.start(*arguments, "train.steps=100000")
    metrics = first.working_copy("moved") / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5, process)
    process.signal(signal.SIGTERM)
    assert process.wait(240) == 128 + signal.SIGTERM
    [step] = stored_steps("moved")
    assert 5 <= step < 100000
    assert json.loads(Store(f"{URL}/moved").read("run.json"))["status"] == "preempted"
    shutil.rmtree(first.folder)
    last = step + 3
    output = second.run_ok(*arguments, f"train.steps={last}")
    assert f"resuming from step {step}" in output and f"{URL}/moved" in output
    assert stored_steps("moved") == [step, last]
    resumed = losses(second.working_copy("moved"))
    assert list(resumed) == [*range(1, last + 1)]
    assert dict(list(resumed.items())[:STEPS]) == dict(list(losses(whole).items())[:last])
    listing = json.loads(second.run_ok("runs", "list", "-o", URL, "--json"))
    assert {run["path"]: run["status"] for run in listing}["moved"] == "finished"
    report = Path(second.run_ok("runs", "report", "moved", "-o", URL).strip())
    assert "moved" in report.read_text()
    weights, prompt = f"checkpoint.load_parameters={URL}/moved", "task.prompt=ROMEO:"
    greedy = [*MODEL, "task=decode", "task.sampling.max_tokens=4", "task.sampling.temperature=0", prompt]
    greedy += ["task.engine.cache_tokens=256"]
    local = f"checkpoint.load_parameters={second.working_copy('moved')}"
    assert second.run_ok(*greedy, weights) == second.run_ok(*greedy, local)
    second.run_ok(*MODEL, "task=convert", weights, "task.output=exported")
    assert (second.folder / "exported" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.outputs=foo://bucket"], "unknown scheme foo://"),
        (["run.outputs=https://host/runs"], "is read-only"),
        (["run.staging=/tmp/x"], "only used if run.outputs is a URL"),
        (["checkpoint.persist_every=100"], "needs a URL"),
        ([f"run.outputs={URL}", "checkpoint.persist_every=150"], r"is not a multiple of checkpoint\.every"),
        (["task=tokenize", f"task.output={URL}"], r"task\.output.*is a URL"),
    ],
)
def test_unsupported_configs(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_composer().check_overrides(overrides).composed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.outputs=foo://bucket"], "unknown scheme foo://"),
        (["-m", "run.seed=0,1", f"run.outputs={URL}"], "sweeps do not support"),
        (["runs", "gc", "-o", URL], "does not support"),
        (["run.outputs=s3://no-such-bucket/runs", "run.name=x", "train.steps=1"], "no-such-bucket"),
    ],
)
def test_commands_that_are_rejected(arguments: list[str], message: str, server: S3Server, tmp_path: Path) -> None:
    done = cli.run(*arguments, cwd=tmp_path, **server.variables, HOME=str(tmp_path))
    assert done.returncode == 2 and message in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_run_in_google_cloud_storage(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """kill -9 during the upload of the second checkpoint; another host resumes from the first, lists and decodes."""
    processes: list[cli.fork_server.Command] = []
    uploaded: set[str] = set()

    def kill_at_second_checkpoint(name: str) -> None:
        if "/checkpoints/" in name:
            uploaded.add(name.partition("/checkpoints/")[2].partition("/")[0])
        if len(uploaded) == 2 and processes:
            processes.pop().kill()

    server, url = GCSServer(kill_at_second_checkpoint), f"gs://{BUCKET}/runs"
    request.addfinalizer(server.close)
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    first, second = Host(tmp_path / "first", server), Host(tmp_path / "second", server)
    arguments = [*RUN, "run.name=killed", f"run.outputs={url}"]
    process = first.start(*arguments)
    processes.append(process)
    assert process.wait(240) == -signal.SIGKILL
    [step] = complete_steps(Store(f"{url}/killed").find())
    shutil.rmtree(first.folder)
    assert f"resuming from step {step} " in second.run_ok(*arguments)
    copy = second.working_copy("killed", "gs")
    assert losses(copy) == losses(whole)
    assert parameter_hash(copy, STEPS) == parameter_hash(whole, STEPS)
    listing = json.loads(second.run_ok("runs", "list", "-o", url, "--json"))
    assert {run["path"]: run["status"] for run in listing} == {"killed": "finished"}
    greedy = [*MODEL, "task=decode", "task.sampling.max_tokens=4", "task.sampling.temperature=0", "task.prompt=ROMEO:"]
    greedy += ["task.engine.cache_tokens=256"]
    completions = {second.run_ok(*greedy, f"checkpoint.load_parameters={path}") for path in (f"{url}/killed", copy)}
    assert len(completions) == 1
