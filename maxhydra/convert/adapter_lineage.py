"""Pinned weights, and the lineage of an adapter: the run that wrote it, and the base that it was trained on.

A location such as outputs/base means its newest checkpoint at the moment of loading. A run records the checkpoint that
it loaded, by step and digest, so that a base run that trains on does not change the runs that build on it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.provenance import parse_yaml
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.quantization import Adapter, AdapterInit, AdapterKind
from maxhydra.config.serialize import read_run_facts
from maxhydra.config.yaml_files import read_yaml_text
from maxhydra.convert.hf_config import is_hf_folder
from maxhydra.convert.orbax_io import FORMAT, PARAMS, find_checkpoint
from maxhydra.convert.peft import SETTINGS, is_peft_folder
from maxhydra.modelfiles import local_path, locate
from maxhydra.modelfiles.hub import hub_commit, is_hub_id
from maxhydra.record.checkpoint_manifest import DamagedCheckpointError, manifest_digest
from maxhydra.record.fingerprint import describe_change, fingerprint_files
from maxhydra.record.storage import is_remote

Record = dict[str, Any]
ACCEPTED = (
    "a run or checkpoint folder, a Hugging Face or PEFT folder with safetensors, a .gguf file, ORG/NAME on the hub, "
    "or package:NAME"
)
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
    identity = {"location": location, "path": str(path)}
    if is_hub_id(location):
        identity["commit"] = hub_commit(key, location)
    return {**identity, **fingerprint_files(_weight_files(key, path), like=_sampled(like))}


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
        if (step := recorded.get("step")) is not None:
            yield from (locate(key, f"{folder}/{step}") for folder in (f"{location}/checkpoints", location))
        if (commit := recorded.get("commit")) is not None and is_hub_id(location):
            yield locate(key, f"{location.partition('@')[0]}@{commit}")
        yield locate(key, location)


def _is_recorded(key: str, location: str, recorded: Mapping[str, Any]) -> bool:
    try:
        return bool(weights_record(key, location, like=recorded)["digest"] == recorded["digest"])
    except ConfigError:
        return False


def _sampled(like: Mapping[str, Any] | None) -> Record | None:
    return dict(like) if like is not None and "sample" in like else None


@dataclasses.dataclass(frozen=True)
class AdapterLineage:
    """The config and base weights that an adapter checkpoint needs in order to be loaded."""

    adapter: Adapter
    base: str
    """Location of the base weights."""
    dtype: str
    """The dtype in which the base weights were loaded."""


def run_folder(source: str | Path) -> Path | None:
    """The run that a run folder, its checkpoints folder or one checkpoint belongs to."""
    path = local_path("checkpoint.load_parameters", str(source)).resolve()
    return next((folder for folder in (path, *path.parents[:2]) if _is_run(folder)), None)


def find_adapter_lineage(key: str, source: str | Path) -> AdapterLineage | None:
    """Lineage of an adapter-only checkpoint; None for other checkpoints. `key` is the config field, for errors."""
    run = run_folder(source)
    settings = {} if run is None else _settings(run)
    fields = settings.get("adapter", {"kind": "none"})
    if run is None or fields["kind"] == AdapterKind.none.value:
        return None
    init = AdapterInit(fields.get("init", AdapterInit.normal.value))
    adapter = Adapter(**{**fields, "kind": AdapterKind(fields["kind"]), "init": init})
    base = settings["checkpoint"]["load_parameters"]
    if base is None and (full_state := settings["checkpoint"]["load_full_state"]) is not None:
        # The run resumed another adapter run, whose base it shares.
        earlier = find_adapter_lineage(key, _resolve_location(run, full_state) or full_state)
        if earlier is None:
            reason = "holds an adapter, but neither its run nor the run it resumed names the base weights"
            raise ConfigError(Problem(key, reason, value=source))
        return dataclasses.replace(earlier, adapter=adapter)
    return AdapterLineage(adapter, _base(key, source, run, base), settings["model"]["dtypes"]["weights"])


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def _settings(run: Path) -> dict[str, Any]:
    """The run's config as plain values, not validated: its data or devices may no longer exist."""
    found = parse_yaml(read_yaml_text(run / "config.yaml"), str(run / "config.yaml")).plain
    return migrate_config(found) if isinstance(found, dict) else {}


def _base(key: str, source: str | Path, run: Path, base: str | None) -> str:
    """Location of the base weights: the checkpoint that the run recorded, else what its config names."""
    if base is None:
        reason = "holds an adapter that was trained on randomly initialized weights, which were not saved"
        hint = "train adapters on weights loaded with checkpoint.load_parameters"
        raise ConfigError(Problem(key, reason, value=source, hint=hint))
    location = _resolve_location(run, base)
    recorded = read_run_facts(run).get("inputs", {}).get("base", {}).get("checkpoint.load_parameters")
    if recorded is not None:
        if (pinned := find_pinned(key, [] if location is None else [location], recorded)) is not None:
            return pinned
        if location is not None:
            difference = describe_weights_change(key, location, recorded)
            reason = f"holds an adapter whose base weights, {base}, have changed: {difference}"
            hint = "restore them, or resume the run with run.accept_changed_inputs=[base] to use the current weights"
            raise ConfigError(Problem(key, reason, value=source, hint=hint))
    if location is None:
        reason = f"holds an adapter trained on the weights of {base}, which do not exist"
        hint = f"restore them, or set checkpoint.load_parameters in {run / 'config.yaml'} to their new location"
        raise ConfigError(Problem(key, reason, value=source, hint=hint))
    return location


def _resolve_location(run: Path, location: str) -> str | None:
    """Resolve a location relative to the run's working directory, else to the current one; None if it is missing."""
    working_directory = read_run_facts(run).get("folder", ".")
    relative = [] if is_remote(location) else [str(Path(working_directory) / Path(location).expanduser())]
    candidates = [*relative, location]
    return next((path for path in candidates if locate("checkpoint.load_parameters", path).exists()), None)
