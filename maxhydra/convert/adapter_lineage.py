"""The run beside a checkpoint of ours: where it lies, and around which weights it trained an adapter."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config import ConfigError, Problem
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.adapter import Adapter, AdapterKind
from maxhydra.modelfiles import locate


@dataclasses.dataclass(frozen=True)
class Origin:
    """What an adapter's checkpoint needs besides itself."""

    adapter: Adapter
    base: str
    """Where the weights around it come from."""
    dtype: str
    """The format in which they were loaded."""


def run_folder(source: str | Path) -> Path | None:
    """The run that a run folder, its checkpoints folder or one checkpoint belongs to."""
    path = Path(source).expanduser().resolve()
    return next((folder for folder in (path, *path.parents[:2]) if _is_run(folder)), None)


def origin(key: str, source: str | Path) -> Origin | None:
    """The origin of a checkpoint that holds an adapter alone; None for any other. `key` is the config field."""
    run = run_folder(source)
    settings = {} if run is None else _settings(run)
    fields = settings.get("adapter", {"kind": "none"})
    if run is None or fields["kind"] == AdapterKind.none.value:
        return None
    adapter = Adapter(**{**fields, "kind": AdapterKind(fields["kind"])})
    base = settings["checkpoint"]["load_parameters"]
    if base is None and (full := settings["checkpoint"]["load_full_state"]) is not None:
        return dataclasses.replace(_known(origin(key, _found(run, full) or full), key, source), adapter=adapter)
    return Origin(adapter, _base(key, source, run, base), settings["model"]["dtypes"]["weights"])


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def _settings(run: Path) -> dict[str, Any]:
    """The run's config as plain values: that its data or devices are gone does not matter here."""
    found = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return migrate_config(found) if isinstance(found, dict) else {}


def _known(found: Origin | None, key: str, source: str | Path) -> Origin:
    if found is None:
        raise ConfigError(Problem(key, "holds an adapter, of which nothing says around which weights", value=source))
    return found


def _base(key: str, source: str | Path, run: Path, base: str | None) -> str:
    if base is None:
        reason = "holds an adapter around weights that were never loaded, only drawn"
        hint = "train adapters around weights of checkpoint.load_parameters"
        raise ConfigError(Problem(key, reason, value=source, hint=hint))
    found = _found(run, base)
    if found is None:
        reason = f"holds an adapter around the weights of {base}, where nothing is"
        hint = f"put them back, or write where they are now into checkpoint.load_parameters of {run / 'config.yaml'}"
        raise ConfigError(Problem(key, reason, value=source, hint=hint))
    return found


def _found(run: Path, location: str) -> str | None:
    """A location as the run meant it: from the folder in which its command was given, else from here."""
    there = json.loads((run / "run.json").read_text(encoding="utf-8")).get("folder", ".")
    places = [str(Path(there) / Path(location).expanduser()), location]
    return next((place for place in places if locate("checkpoint.load_parameters", place).exists()), None)
