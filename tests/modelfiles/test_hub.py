"""Locations on the Hugging Face hub, against a hub on loopback: downloads, revisions, failures, offline mode, push."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxhydra.cli import main
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.convert.adapter_lineage import find_pinned, weights_record
from maxhydra.convert.load import load_weights
from maxhydra.data import load_tokenizer
from maxhydra.model import build
from maxhydra.modelfiles import hub as hub_module
from maxhydra.modelfiles.hub import hub_folder, is_hub_id
from maxhydra.train.run_inputs import record_inputs
from tests.support.hub import TOKEN, Hub, serve_hub
from tests.support.vocabularies import MARKS, byte_level, save

GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "llama"
KEY, REPO = "checkpoint.load_parameters", "org/model"
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer, and files that must not be downloaded."""
    path = tmp_path / "published"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, path)
    settings = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (300, settings["hidden_size"]))
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**settings, "vocab_size": 300}))
    save(byte_level(MARKS["llama3"], 280), path)
    for name in ("pytorch_model.bin", "modeling_llama.py", "training_args.bin"):
        (path / name).write_bytes(b"code")
    return path


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as server:
        server.add(REPO, folder)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        hub_module._download.cache_clear()
        yield server
        hub_module._download.cache_clear()


@pytest.mark.slow
def test_a_model_and_its_tokenizer_load_from_the_hub(hub: Hub, folder: Path) -> None:
    config = compose(["task=decode", "model=from_hf", f"model.path={REPO}"]).config
    assert not any(path.endswith(".safetensors") for _, path, _ in hub.requests), "composition needs no weights"
    assert load_tokenizer(config.data).encode("abc")
    params = load_weights(REPO, build(config.model), shardings=None, dtype="float32")
    expected = load_weights(str(folder), build(config.model), shardings=None, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    downloaded = hub_folder(KEY, REPO, weights=True)
    assert {path.name for path in downloaded.iterdir()} == FILES
    assert {token for _, _, token in hub.requests} == {None}


def test_a_local_path_is_not_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert is_hub_id("org/name") and is_hub_id("org/name-1.5@v1.0") and is_hub_id("org/name@refs/pr/1")
    for location in ("outputs/missing", "./org/name", "/org/name", "~/name", "name", "a/b/c", "org/x.gguf", "s3://a/b"):
        assert not is_hub_id(location), location


def test_a_session_uses_one_commit_and_a_run_pins_it(hub: Hub, folder: Path) -> None:
    first = hub.commit(REPO)
    record = weights_record(KEY, REPO)
    assert record["commit"] == first and Path(record["path"]).name == first
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    hub.add(REPO, folder)
    assert hub.commit(REPO) != first and weights_record(KEY, REPO)["commit"] == first
    hub_module._download.cache_clear()
    # A later session: the branch has moved, and the pinned commit is still in the cache.
    assert weights_record(KEY, REPO)["commit"] == hub.commit(REPO)
    assert find_pinned(KEY, [REPO], record) == record["path"]
    assert weights_record(KEY, f"{REPO}@{hub.commit(REPO)}")["commit"] == hub.commit(REPO)


FAILURES = {
    "missing": ("org/absent", "is neither a local path nor a repository on http://127.0.0.1"),
    "revision": (f"{REPO}@v9", "the repository org/model has no revision v9"),
    "gated": ("org/gated", "is a gated repository, and HF_TOKEN is not set"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_name_the_cause(case: str, hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    location, reason = FAILURES[case]
    hub.add("org/gated", folder)
    hub.gated.add("org/gated")
    assert main.run(["task=decode", "model=from_hf", f"model.path={location}"]) == 2
    output = capsys.readouterr().err
    assert (
        output.count(reason) == 1
        and "Traceback" not in output
        and f"model.path={location}" in output.replace(": ", "=")
    )


def test_a_token_of_the_environment_opens_a_gated_repository(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/gated", folder)
    hub.gated.add("org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (hub_folder(KEY, "org/gated", weights=True) / "model.safetensors").is_file()


def test_no_network_and_offline_mode(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_folder(KEY, REPO, weights=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub_module._download.cache_clear()
    seen = len(hub.requests)
    assert (hub_folder(KEY, REPO, weights=True) / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"is not in the cache .* and HF_HUB_OFFLINE forbids to download it"):
        hub_folder(KEY, "org/other", weights=False)
    assert len(hub.requests) == seen
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"cannot be downloaded from http://127.0.0.1.*ConnectError"):
        hub_folder(KEY, "org/third", weights=False)


def test_a_run_records_the_commit(hub: Hub) -> None:
    config = compose(["task=sft", "adapter=lora", "model=from_hf", f"model.path={REPO}"]).config
    record = record_inputs(config)["base"][KEY]
    assert record["location"] == REPO and record["commit"] == hub.commit(REPO)


@pytest.mark.slow
def test_push_uploads_the_exported_folder(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["task=convert", "model=from_hf", f"model.path={REPO}", "task.output=out"]
    assert main.run(command) == 0
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main.run([*command, "task.push=org/pushed"]) == 0
    output = capsys.readouterr().err
    assert "out is already complete" in output and f"pushed {hub.url}/org/pushed/commit/" in output
    files = {path.name: path.read_bytes() for path in Path("out").iterdir() if path.name != ".conversion.json"}
    assert hub.repos["org/pushed"] == files


@pytest.mark.slow
def test_a_push_without_a_token_is_rejected(hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["task=convert", "model=from_hf", f"model.path={folder}", "task.output=out"]
    assert main.run([*command, "task.push=org/pushed"]) == 2
    assert "needs a token with write access in the environment variable HF_TOKEN" in capsys.readouterr().err
    assert main.run([*command, "task.push=pushed"]) == 2
    assert "is not the name of a repository" in capsys.readouterr().err
    assert not Path("out").exists()
