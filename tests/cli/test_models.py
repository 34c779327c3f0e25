"""maxhydra models: published sizes, from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from maxhydra.cli import main
from maxhydra.cli.commands import models


def test_sizes_are_counted_once_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """46.7 billion weights, 12.9 billion active (Jiang et al., 2024)."""
    monkeypatch.setattr(models, "CACHE", tmp_path / "kept" / "models.json")
    assert main.run(["models", "mixtral-8x7b", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 46_702_792_704 and round(found["active"] / 1e9, 1) == 12.9
    assert (found["layers"], found["context"], found["licence"]) == (32, 32768, "Apache-2.0")
    monkeypatch.setattr(models, "_count", lambda name, folders: pytest.fail("counted twice"))
    assert main.run(["models", "mixtral-8x7*"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["mixtral-8x7b", "46.7B", "12.88B", "32", "32k"]
    assert main.run(["models", "mixtrl-8x7b"]) == 2 and "mixtral-8x7b" in capsys.readouterr().err


@pytest.mark.slow
def test_models_of_a_project_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An option that inherits from a packaged one, in a folder of --config-dir or of Hydra's search path."""
    monkeypatch.setattr(models, "CACHE", tmp_path / "models.json")
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "llama2-mine.yaml").write_text(
        "# Mine.\ndefaults:\n  - micro\n  - _self_\nnum_layers: 1\n"
    )
    conf = str(tmp_path / "conf")
    for arguments in (["--config-dir", conf], [f"hydra.searchpath=[file://{conf}]"]):
        assert main.run(["models", "mine", "--json", *arguments]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["model"], found["layers"], found["licence"]) == ("llama2-mine", 1, "")
    assert found["description"] == "Mine."
    assert main.run(["models", "mine"]) == 2
    assert main.run(["models", "--config-dir", "nowhere"]) == 2 and "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_only_published_models_have_a_license(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(models, "CACHE", tmp_path / "models.json")
    monkeypatch.setattr(models, "_count", lambda name: dict.fromkeys(("parameters", "active", "layers", "context"), 0))
    assert main.run(["models", "--json"]) == 0
    found = {model["model"]: model["licence"] for model in json.loads(capsys.readouterr().out)}
    tiny = {name: licence for name, licence in found.items() if "tiny" in name}
    assert "gemma3-tiny-vision" in tiny and not any(tiny.values())
    assert found["gemma3-4b"] == "Gemma Terms of Use"
