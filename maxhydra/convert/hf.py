"""Weights in a Hugging Face folder: config.json and safetensors, in one file or several with an index."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from maxhydra.config import ConfigError, Problem
from maxhydra.config import model as config
from maxhydra.convert.facts import THETA, derived
from maxhydra.convert.source import Source, no_table
from maxhydra.convert.table import Table, all_tables
from maxhydra.layers.rope import frequencies

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STRETCHED = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def hf_source(key: str, location: str, folder: Path) -> Source:
    """A folder whose model_type has a table."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = _files(key, location, folder)
        shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    except (ValueError, OSError, SafetensorError) as error:
        raise ConfigError(Problem(key, f"cannot be read: {error}", value=location)) from None
    known = {name: table for table in all_tables() for name in table.hf_types}
    model_type = settings.get("model_type")
    if model_type not in known:
        raise no_table(key, location, f"folder of model_type {model_type}", list(known))
    where = {name: file for file in files for name in _shapes(file)}

    def read(name: str) -> np.ndarray:
        with safe_open(where[name], framework="numpy") as opened:
            array: np.ndarray = opened.get_tensor(name)
        return array

    facts = _facts(key, location, settings, known[model_type], has_head="lm_head.weight" in shapes)
    return Source(
        key=key, location=location, table=known[model_type], facts=facts, shapes=shapes, read=read, is_gguf=False
    )


def _files(key: str, location: str, folder: Path) -> list[Path]:
    """The safetensors files, by the index where there is one; never a pickle, which can run code when it is read."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [SINGLE]
    files = [folder / Path(name).name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        reason = f"has no {missing[0]}" + (f" and {len(missing) - 1} more of its index" if len(missing) > 1 else "")
        hint = "weights in .bin or .pt files can run code when read; save them as safetensors"
        raise ConfigError(Problem(key, reason, value=location, accepted=f"{SINGLE}, or {INDEX}", hint=hint))
    return files


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="numpy") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _facts(key: str, location: str, settings: dict[str, Any], table: Table, *, has_head: bool) -> dict[str, Any]:
    facts = derived({name: settings.get(theirs) for name, theirs in table.hf_facts.items()})
    is_tied = settings.get("tie_word_embeddings", not has_head)
    facts["head"] = (config.Head.tied if is_tied else config.Head.separate).value
    facts["frequencies"] = frequencies(_rope(key, location, settings), facts["head_dim"])
    return facts


def _rope(key: str, location: str, settings: dict[str, Any]) -> config.Rope:
    """Rotary positions as config.json tells them: rope_parameters, or in older files rope_theta and rope_scaling."""
    told = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    found: dict[str, Any] = {"theta": float(told.get("rope_theta") or settings.get("rope_theta") or THETA)}
    kind = told.get("rope_type") or told.get("type") or config.RopeKind.default.value
    if kind == config.RopeKind.default.value:
        return config.Rope(**found)
    if kind != config.RopeKind.llama3.value:
        reason = f"stretches its context by rope_type={kind}"
        raise ConfigError(Problem(key, reason, value=location, accepted="rope_type default or llama3"))
    found |= {ours: told[theirs] for ours, theirs in STRETCHED.items()}
    return config.Rope(kind=config.RopeKind.llama3, **found)
