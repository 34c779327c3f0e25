"""Folders that are not what they should be: each is named, with exit code 2, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from maxhydra.cli import main
from tests.support.golden_models import tensors_of

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
INDEX = "model.safetensors.index.json"


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = tensors_of(folder / "model.safetensors")
    change(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")


def set_up(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def missing_shard(folder: Path) -> None:
    tensors = tensors_of(folder / "model.safetensors")
    where = {name: f"model-{1 + ('norm' in name)}.safetensors" for name in tensors}
    save_file({name: tensors[name] for name in tensors if "norm" not in name}, folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


UP = "model.layers.1.mlp.up_proj.weight"
CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing shard": ("llama", missing_shard, "has no model-2.safetensors"),
    "missing tensor": ("llama", lambda at: rewrite(at, lambda tensors: tensors.pop(UP)), f"lacks {UP}"),
    "wrong shape": (
        "llama",
        lambda at: rewrite(at, lambda tensors: tensors.update({UP: tensors[UP][:-1]})),
        f"{UP} is [47, 32], where the model has [48, 32]",
    ),
    "unknown architecture": ("llama", lambda at: set_up(at, model_type="unheard"), "folder of model_type unheard"),
    "tied head that is stored": (
        "llama3.1",
        lambda at: rewrite(at, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "holds lm_head.weight, which differs from model.embed_tokens.weight",
    ),
    "extra tensor": (
        "llama",
        lambda at: rewrite(at, lambda tensors: tensors.update({"model.extra.weight": tensors[UP]})),
        "holds model.extra.weight, for which the model has no place",
    ),
    "cut short": ("llama", cut_short, "model.safetensors cannot be read"),
    "unserved packing": (
        "llama",
        lambda at: set_up(at, quantization_config={"quant_method": "gptq"}),
        "quant_method=gptq, where fp8, mxfp4 are served",
    ),
    "unserved setting": (
        "llama",
        lambda at: set_up(at, rope_parameters={"rope_type": "unheard", "rope_theta": 1e4}),
        "rope_type=unheard",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_folder_is_named_and_nothing_is_written(case: str, tmp_path: Path, capsys: Any) -> None:
    family, damage, told = CASES[case]
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / family, folder)
    damage(folder)
    asked = ["task=convert", "model=from_hf", f"model.path={folder}", f"task.output={tmp_path / 'out'}"]
    assert main.run([*asked, "train.seq_len=64"]) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tied_head_that_is_stored_twice_is_no_harm(tmp_path: Path) -> None:
    """Some published folders hold the embedding under both names."""
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / "llama3.1", folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    asked = ["task=convert", "model=from_hf", f"model.path={folder}", f"task.output={tmp_path / 'out'}"]
    assert main.run([*asked, "train.seq_len=64"]) == 0
    assert "lm_head.weight" not in tensors_of(tmp_path / "out" / "model.safetensors")
