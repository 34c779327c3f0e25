"""model=from_hf: model, weights and tokenizer of a Hugging Face folder."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import maxhydra.convert  # noqa: F401  registers model=from_hf
from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import Composer, compose
from maxhydra.config.schema.model import Audio, Vision
from maxhydra.config.serialize import from_yaml, to_yaml

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
SHORT = "train.seq_len=64"


def composed(folder: Path, *overrides: str) -> Config:
    return compose(["model=from_hf", f"model.path={folder}", *overrides]).config


def error_message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose([SHORT, *overrides])
    return str(caught.value)


@pytest.mark.slow
def test_images_of_a_multimodal_folder_are_an_option_of_their_own() -> None:
    """The text decoder is the default, as in runs that were started before models took images."""
    folder = Path(__file__).parent / "gemma3_vision"
    path = f"model.path={folder}"
    vision = compose(["model=from_hf_vision", path, SHORT]).config.model
    assert composed(folder, SHORT).model == dataclasses.replace(vision, vision=Vision())
    assert (vision.vision.num_layers, vision.vision.projector.tokens, vision.vision.placeholder_id) == (2, 9, 62)
    text = error_message("model=from_hf_vision", f"model.path={GOLDEN / 'llama'}")
    assert "has no image encoder of a supported kind" in text and "choose model=from_hf" in text


@pytest.mark.slow
def test_audio_of_a_multimodal_folder_is_an_option_of_its_own() -> None:
    folder = Path(__file__).parent / "omni_audio"
    audio = compose(["model=from_hf_audio", f"model.path={folder}", SHORT]).config.model
    assert composed(folder, SHORT).model == dataclasses.replace(audio, audio=Audio())
    assert (audio.audio.num_layers, audio.audio.window_chunks, audio.audio.placeholder_id) == (2, 2, 62)
    text = error_message("model=from_hf_audio", f"model.path={GOLDEN / 'llama'}")
    assert "has no audio encoder of a supported kind" in text and "choose model=from_hf" in text


def test_the_folder_defines_the_model_and_the_command_line_overrides_it() -> None:
    folder = GOLDEN / "mistral"
    hf_config = json.loads((folder / "config.json").read_text())
    config = composed(folder, "model.remat.policy=full", "model.kinds.layer.mlp.activation=gelu")
    assert config.model.num_layers == hf_config["num_hidden_layers"]
    assert config.model.kinds["layer"].attention.window == hf_config["sliding_window"]
    assert config.model.remat.policy.value == "full" and config.model.kinds["layer"].mlp.activation.value == "gelu"
    assert config.checkpoint.load_parameters == str(folder) and config.data.tokenizer.kind == "byte"
    assert config.train.seq_len == hf_config["max_position_embeddings"]
    assert composed(folder, "checkpoint.load_parameters=null").checkpoint.load_parameters is None


@pytest.mark.slow
def test_an_experiment_may_name_the_folder(tmp_path: Path) -> None:
    named = "# @package _global_\ndefaults:\n  - override /model: from_hf\nmodel:\n  path: {}\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(named.format(GOLDEN / "mistral"))
    (tmp_path / "experiment" / "idle.yaml").write_text("# @package _global_\nmodel:\n  path: somewhere\n")
    composer = Composer(str(tmp_path))
    config = composer.check_overrides(["experiment=mine"]).composed().config
    assert config == composed(GOLDEN / "mistral")
    assert config == composer.check_overrides(["experiment=mine"], with_hydra=False).composed().config
    other = composer.check_overrides(["experiment=mine", f"model.path={GOLDEN / 'llama'}"]).composed().config
    assert other == composed(GOLDEN / "llama")
    assert "choose model=from_hf" in str(composer.check_overrides(["experiment=idle"]).problems[0])


def test_the_tokenizer_of_the_folder_is_used(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    tokenizer = composed(tmp_path / "model").data.tokenizer
    assert (tokenizer.kind, tokenizer.path) == ("hf", str(tmp_path / "model"))


@pytest.mark.slow
def test_the_runs_config_needs_no_folder(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    config = composed(tmp_path / "model", "checkpoint.load_parameters=null")
    shutil.rmtree(tmp_path / "model")
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.slow
def test_an_unreadable_folder_is_one_short_message(tmp_path: Path) -> None:
    assert error_message("model=from_hf").count("model.") == 1
    assert "is not a folder" in error_message("model=from_hf", f"model.path={tmp_path / 'nowhere'}")
    assert "has no config.json" in error_message("model=from_hf", f"model.path={tmp_path}")
    assert "choose model=from_hf" in error_message("model=tiny", f"model.path={tmp_path}")
    settings = tmp_path / "config.json"
    for text, message_part in {
        "{": "config.json cannot be read",
        "[]": "is not a JSON object",
        '{"model_type": "unheard"}': "has unsupported model_type unheard",
        '{"model_type": "llama"}': "config.json lacks",
    }.items():
        settings.write_text(text)
        message = error_message("model=from_hf", f"model.path={tmp_path}")
        assert message_part in message and len(message.splitlines()) <= 4, message


@pytest.mark.exhaustive
def test_the_config_is_shown_without_jax() -> None:
    code = (
        "import sys; from maxhydra.cli import main;"
        f"code = main.run(['--cfg', 'job', 'model=from_hf', 'model.path={GOLDEN / 'llama'}', '{SHORT}']);"
        "assert 'jax' not in sys.modules and 'torch' not in sys.modules; sys.exit(code)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "num_layers: 3" in shown.stdout
