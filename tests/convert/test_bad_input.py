"""Invalid Hugging Face folders: task=convert reports them, exits with code 2 and writes nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from maxhydra.cli import main
from maxhydra.config import ConfigError
from maxhydra.convert.hf import hf_source
from tests.support.golden_models import tensors_of

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
INDEX = "model.safetensors.index.json"


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = tensors_of(folder / "model.safetensors")
    change(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")


def edit_settings(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def missing_shard(folder: Path) -> None:
    tensors = tensors_of(folder / "model.safetensors")
    weight_map = {name: f"model-{1 + ('norm' in name)}.safetensors" for name in tensors}
    save_file({name: tensors[name] for name in tensors if "norm" not in name}, folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


UP = "model.layers.1.mlp.up_proj.weight"
CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing shard": ("llama", missing_shard, "has no model-2.safetensors"),
    "missing tensor": (
        "llama",
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(UP)),
        f"is missing {UP}",
    ),
    "wrong shape": (
        "llama",
        lambda folder: edit_tensors(folder, lambda tensors: tensors.update({UP: tensors[UP][:-1]})),
        f"{UP} has shape [47, 32], but the model expects [48, 32]",
    ),
    "10^9 layers": (
        "llama",
        lambda folder: edit_settings(folder, num_hidden_layers=10**9),
        "config.json has num_hidden_layers = 1e+09 (at most 10000)",
    ),
    "10^6 layer types": (
        "gemma3",
        lambda folder: edit_settings(folder, layer_types=["full_attention"] * 10**6),
        "config.json has layer_types with 1000000 items (at most 10000)",
    ),
    "nested settings": (
        "llama",
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "config.json cannot be read: is not accepted: its values are nested too deeply",
    ),
    "unknown architecture": (
        "llama",
        lambda folder: edit_settings(folder, model_type="unheard"),
        "has unsupported model_type unheard",
    ),
    "stored tied head": (
        "llama3.1",
        lambda folder: edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "contains lm_head.weight, which differs from model.embed_tokens.weight",
    ),
    "extra tensor": (
        "llama",
        lambda folder: edit_tensors(folder, lambda tensors: tensors.update({"model.extra.weight": tensors[UP]})),
        "contains model.extra.weight, which the model has no parameter for",
    ),
    "truncated file": ("llama", truncated_file, "model.safetensors cannot be read"),
    "unsupported quantization": (
        "llama",
        lambda folder: edit_settings(folder, quantization_config={"quant_method": "gptq"}),
        "unsupported quantization_config.quant_method=gptq (supported: fp8, mxfp4, compressed-tensors)",
    ),
    "unsupported setting": (
        "llama",
        lambda folder: edit_settings(folder, rope_parameters={"rope_type": "unheard", "rope_theta": 1e4}),
        "unsupported rope_type=unheard",
    ),
}


# Those that a run finds while it reads the weights take two seconds each; "missing shard" stands for them by default.
LATE = (
    "missing tensor",
    "wrong shape",
    "stored tied head",
    "extra tensor",
    "truncated file",
    "unsupported quantization",
)


@pytest.mark.slow
@pytest.mark.default_cases(*(case for case in CASES if case not in LATE))
@pytest.mark.parametrize("case", CASES)
def test_an_invalid_folder_is_reported_and_nothing_is_written(case: str, tmp_path: Path, capsys: Any) -> None:
    family, damage, message = CASES[case]
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / family, folder)
    damage(folder)
    args = ["task=convert", "model=from_hf", f"model.path={folder}", f"task.output={tmp_path / 'out'}"]
    assert main.run([*args, "train.seq_len=64"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow
def test_a_tied_head_that_is_also_stored_is_accepted(tmp_path: Path) -> None:
    """Some published folders store the embedding under both names."""
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / "llama3.1", folder)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    args = ["task=convert", "model=from_hf", f"model.path={folder}", f"task.output={tmp_path / 'out'}"]
    assert main.run([*args, "train.seq_len=64"]) == 0
    assert "lm_head.weight" not in tensors_of(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "unsupported use_bidirectional_attention=True"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"unsupported attn_logit_softcapping=50.0 \(supported: null\)"),
        ("llama", {"partial_rotary_factor": 0.5}, r"unsupported partial_rotary_factor=0.5 \(supported: 1\)"),
        ("llama4_text", {"layer_types": ["full_attention"] * 4}, "unsupported layer_types"),
        ("llama4_text", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "unsupported rope_type=yarn"),
        ("olmo_hybrid", {"hidden_act": "gelu"}, "unsupported hidden_act=gelu of linear_attention layers"),
        ("qwen3_next", {"hidden_act": "gelu"}, "unsupported hidden_act=gelu of linear_attention layers"),
    ],
)
def test_settings_that_the_family_ignores_or_lacks_are_rejected(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(GOLDEN / family, tmp_path / "in")
    edit_settings(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        hf_source("model.path", str(folder), folder)
