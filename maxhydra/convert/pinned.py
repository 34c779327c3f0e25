"""Pinned weights: which checkpoint or files a run loaded, and where to find exactly these again.

A location such as outputs/base means its newest checkpoint at the moment of loading. A run records the checkpoint that
it loaded, by step and digest, so that a base run that trains on does not change the runs that build on it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.hf_config import is_hf_folder
from maxhydra.convert.orbax_io import FORMAT, PARAMS, checkpoint_steps, find_checkpoint
from maxhydra.convert.peft import SETTINGS, is_peft_folder
from maxhydra.modelfiles import locate
from maxhydra.record.checkpoint_manifest import DamagedCheckpointError, manifest_digest
from maxhydra.record.fingerprint import describe_change, fingerprint_files

Record = dict[str, Any]
ACCEPTED = "a run or checkpoint folder, a Hugging Face or PEFT folder with safetensors, a .gguf file, or package:NAME"
HF_FILES = ("*.json", "*.safetensors")


def weights_record(key: str, location: str, *, like: Mapping[str, Any] | None = None) -> Record:
    """What a location of weights means now: path, step if it is a checkpoint, and digest.

    `key` is the config field that names the location. `like` is an earlier record whose sampling to repeat.
    """
    path = locate(key, location)
    if not path.exists():
        raise ConfigError(Problem(key, "does not exist", value=location, accepted=ACCEPTED))
    if path.is_dir() and not is_hf_folder(path) and not is_peft_folder(path):
        return {"location": location, **_checkpoint_record(key, find_checkpoint(key, location), like)}
    return {"location": location, "path": str(path), **fingerprint_files(_weight_files(key, path), like=_sampled(like))}


def find_pinned(key: str, locations: list[str], recorded: Mapping[str, Any]) -> str | None:
    """The path of the recorded weights, at their recorded path or in one of the locations; None if they are gone."""
    for candidate in _candidates(key, locations, recorded):
        if candidate.exists() and _is_recorded(key, str(candidate), recorded):
            return str(candidate)
    return None


def describe_weights_change(key: str, location: str, recorded: Mapping[str, Any]) -> str:
    """How the weights of a location differ from the recorded ones."""
    now = weights_record(key, location, like=recorded)
    if "step" not in recorded and "step" not in now:
        files = _weight_files(key, locate(key, location))
        return describe_change(dict(recorded), now, files)
    return f"it was {_describe(recorded)}, and is now {_describe(now)}"


def _describe(record: Mapping[str, Any]) -> str:
    what = f"step {record['step']} of " if record.get("step") is not None else ""
    return f"{what}{record['path']} (digest {record['digest'][:12]})"


def _checkpoint_record(key: str, checkpoint: Path, like: Mapping[str, Any] | None) -> Record:
    step = int(checkpoint.name) if checkpoint.name.isdigit() else None
    try:
        digest = manifest_digest(checkpoint)
    except DamagedCheckpointError as error:
        hint = "copy it again, or name an earlier checkpoint, RUN/checkpoints/STEP"
        raise ConfigError(Problem(key, f"is damaged: {error}", value=checkpoint, hint=hint)) from None
    identity: Record = {"path": str(checkpoint), "step": step}
    if digest is not None:
        return {**identity, "digest": digest}
    # Written before checkpoints had manifests.
    files = [*sorted(path for path in (checkpoint / PARAMS).rglob("*") if path.is_file()), checkpoint / FORMAT]
    found = fingerprint_files([path for path in files if path.is_file()], like=_sampled(like))
    return {**identity, "digest": found["digest"], "sample": found["sample"]}


def _weight_files(key: str, path: Path) -> list[Path]:
    """The files of a GGUF file, a Hugging Face folder, or a PEFT folder and its base."""
    if path.is_file():
        return [path]
    files = sorted(file for pattern in HF_FILES for file in path.glob(pattern))
    if not is_peft_folder(path):
        return files
    try:
        base = json.loads((path / SETTINGS).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    folder = locate(key, str(base)) if base else None
    return files + (_weight_files(key, folder) if folder is not None and is_hf_folder(folder) else [])


def _candidates(key: str, locations: list[str], recorded: Mapping[str, Any]) -> Iterator[Path]:
    yield Path(recorded["path"])
    for location in locations:
        root = locate(key, location)
        if (step := recorded.get("step")) is not None:
            yield from (
                folder / str(step) for folder in (root / "checkpoints", root) if step in checkpoint_steps(folder)
            )
        yield root


def _is_recorded(key: str, location: str, recorded: Mapping[str, Any]) -> bool:
    try:
        return bool(weights_record(key, location, like=recorded)["digest"] == recorded["digest"])
    except ConfigError:
        return False


def _sampled(like: Mapping[str, Any] | None) -> Record | None:
    return dict(like) if like is not None and "sample" in like else None
