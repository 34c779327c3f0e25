"""Launchers by name: the settings class and the backend of each, as named in sweep.json and hydra/launcher."""

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import JobBackend, LauncherSettings, SweepContext
from maxhydra.launch.gke import GkeJobs, GkeSettings
from maxhydra.launch.local import LocalJobs, LocalSettings
from maxhydra.launch.slurm import SlurmJobs, SlurmSettings

LAUNCHERS: dict[str, tuple[type[LauncherSettings], Callable[[Any, SweepContext], JobBackend]]] = {
    "local": (LocalSettings, LocalJobs),
    "slurm": (SlurmSettings, SlurmJobs),
    "gke": (GkeSettings, GkeJobs),
}
# Module of the Hydra plugins: hydra.launcher._target_ is <PLUGINS>.<Kind>Launcher.
PLUGINS = "hydra_plugins.maxhydra_launcher"


def make_backend(launcher: LauncherSettings, sweep: SweepContext) -> JobBackend:
    return LAUNCHERS[launcher.kind][1](launcher, sweep)


def launcher_from_json(stored: Mapping[str, Any]) -> LauncherSettings:
    """Inverse of `LauncherSettings.to_json`."""
    options = dict(stored)
    kind = options.pop("kind")
    if kind not in LAUNCHERS:
        raise ConfigError(Problem("launcher", "is not a known launcher", kind, ", ".join(LAUNCHERS)))
    return LAUNCHERS[kind][0](**{name: lists_to_tuples(value) for name, value in options.items()})


def is_maxhydra_launcher(node: DictConfig) -> bool:
    """True if hydra.launcher is one of the launchers in `LAUNCHERS`."""
    return str(node._target_).startswith(f"{PLUGINS}.")


def launcher_settings(node: DictConfig) -> LauncherSettings:
    """Settings in hydra.launcher; `LocalSettings` for any other launcher, including Hydra's default."""
    if not is_maxhydra_launcher(node):
        return LocalSettings()
    options = OmegaConf.to_container(node, resolve=True)
    assert isinstance(options, dict)
    kind = options.pop("_target_").removeprefix(f"{PLUGINS}.").removesuffix("Launcher").lower()
    return launcher_from_json({"kind": kind, **{str(name): value for name, value in options.items()}})


def hydra_defaults(kind: str) -> dict[str, Any]:
    """Option names and defaults of a launcher, in the form Hydra's config store expects."""
    return {name: _to_hydra_value(value) for name, value in vars(LAUNCHERS[kind][0]()).items()}


def _to_hydra_value(value: Any) -> Any:
    """Convert tuples to lists, and dicts to mappings that accept new keys, which Hydra's struct mode forbids."""
    if isinstance(value, dict):
        return OmegaConf.create(value, flags={"struct": False})
    return list(value) if isinstance(value, tuple) else value


def lists_to_tuples(value: Any) -> Any:
    """Convert lists, also nested ones, to tuples; JSON and YAML have no tuples."""
    return tuple(lists_to_tuples(item) for item in value) if isinstance(value, list) else value
