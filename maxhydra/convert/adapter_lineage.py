"""Lineage of an adapter checkpoint: the run that wrote it, and the base weights it was trained on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.provenance import parse_yaml
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.quantization import Adapter, AdapterKind
from maxhydra.config.yaml_files import read_yaml_text
from maxhydra.convert.pinned import describe_weights_change, find_pinned
from maxhydra.modelfiles import locate


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
    path = Path(source).expanduser().resolve()
    return next((folder for folder in (path, *path.parents[:2]) if _is_run(folder)), None)


def find_adapter_lineage(key: str, source: str | Path) -> AdapterLineage | None:
    """Lineage of an adapter-only checkpoint; None for other checkpoints. `key` is the config field, for errors."""
    run = run_folder(source)
    settings = {} if run is None else _settings(run)
    fields = settings.get("adapter", {"kind": "none"})
    if run is None or fields["kind"] == AdapterKind.none.value:
        return None
    adapter = Adapter(**{**fields, "kind": AdapterKind(fields["kind"])})
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


def _facts(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return facts


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
    recorded = _facts(run).get("inputs", {}).get("base", {}).get("checkpoint.load_parameters")
    if recorded is not None:
        if (pinned := find_pinned(key, [] if location is None else [location], recorded)) is not None:
            return pinned
        if location is not None:
            difference = describe_weights_change(key, location, recorded)
            reason = f"holds an adapter whose base weights, {base}, have changed: {difference}"
            hint = "restore them, or resume the run with run.accept_changed_inputs=[base] to use what is there now"
            raise ConfigError(Problem(key, reason, value=source, hint=hint))
    if location is None:
        reason = f"holds an adapter trained on the weights of {base}, which do not exist"
        hint = f"restore them, or set checkpoint.load_parameters in {run / 'config.yaml'} to their new location"
        raise ConfigError(Problem(key, reason, value=source, hint=hint))
    return location


def _resolve_location(run: Path, location: str) -> str | None:
    """Resolve a location relative to the run's working directory, else to the current one; None if it is missing."""
    working_directory = _facts(run).get("folder", ".")
    candidates = [str(Path(working_directory) / Path(location).expanduser()), location]
    return next((path for path in candidates if locate("checkpoint.load_parameters", path).exists()), None)
