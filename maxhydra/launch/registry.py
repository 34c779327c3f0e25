"""Launchers by name: the settings class and the backend of each, as named in sweep.json and hydra/launcher."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import JobBackend, LauncherSettings, SweepContext, Trial
from maxhydra.launch.gke import GkeJobs, GkeSettings
from maxhydra.launch.local import LocalJobs, LocalSettings
from maxhydra.launch.skypilot import SkypilotSettings, render_tasks
from maxhydra.launch.slurm import SlurmJobs, SlurmSettings

LAUNCHERS: dict[str, tuple[type[LauncherSettings], Callable[[Any, SweepContext], JobBackend]]] = {
    "local": (LocalSettings, LocalJobs),
    "slurm": (SlurmSettings, SlurmJobs),
    "gke": (GkeSettings, GkeJobs),
}
# Launchers that only `maxhydra launch render` supports: another program starts the rendered tasks.
RENDERERS: dict[str, tuple[type[LauncherSettings], Callable[[Any, SweepContext, Sequence[Trial]], str]]] = {
    "skypilot": (SkypilotSettings, render_tasks),
}
# Module of the Hydra plugins: hydra.launcher._target_ is <PLUGINS>.<Kind>Launcher.
PLUGINS = "hydra_plugins.maxhydra_launcher"


def make_backend(launcher: LauncherSettings, sweep: SweepContext) -> JobBackend:
    if launcher.kind in RENDERERS:
        hint = f"print its tasks with maxhydra launch render hydra/launcher={launcher.kind} ..."
        raise ConfigError(Problem("hydra/launcher", "does not start jobs", launcher.kind, ", ".join(LAUNCHERS), hint))
    return LAUNCHERS[launcher.kind][1](launcher, sweep)


def render(launcher: LauncherSettings, sweep: SweepContext, trials: Sequence[Trial]) -> str:
    """Scripts, manifests or tasks of a launcher, as text."""
    if launcher.kind in RENDERERS:
        return RENDERERS[launcher.kind][1](launcher, sweep, trials)
    return make_backend(launcher, sweep).render(trials)


def settings_class(kind: str) -> type[LauncherSettings]:
    return {**LAUNCHERS, **RENDERERS}[kind][0]


def launcher_from_json(stored: Mapping[str, Any]) -> LauncherSettings:
    """Inverse of `LauncherSettings.to_json`."""
    options = dict(stored)
    kind = options.pop("kind")
    if kind not in (known := [*LAUNCHERS, *RENDERERS]):
        raise ConfigError(Problem("launcher", "is not a known launcher", kind, ", ".join(known)))
    return settings_class(kind)(**{name: lists_to_tuples(value) for name, value in options.items()})


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
    return {name: _to_hydra_value(value) for name, value in vars(settings_class(kind)()).items()}


def _to_hydra_value(value: Any) -> Any:
    """Convert tuples to lists, and dicts to mappings that accept new keys, which Hydra's struct mode forbids."""
    if isinstance(value, dict):
        return OmegaConf.create(value, flags={"struct": False})
    return list(value) if isinstance(value, tuple) else value


def lists_to_tuples(value: Any) -> Any:
    """Convert lists, also nested ones, to tuples; JSON and YAML have no tuples."""
    return tuple(lists_to_tuples(item) for item in value) if isinstance(value, list) else value
