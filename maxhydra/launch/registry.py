"""The table of places: the settings and the jobs of each, by the name that sweep.json and hydra/launcher give it."""

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import JobBackend, Shared
from maxhydra.launch.gke import GkeJobs, GkeSettings
from maxhydra.launch.local import LocalJobs, LocalSettings
from maxhydra.launch.settings import LauncherSettings
from maxhydra.launch.slurm import SlurmJobs, SlurmSettings

PLACES: dict[str, tuple[type[LauncherSettings], Callable[[Any, Shared], JobBackend]]] = {
    "local": (LocalSettings, LocalJobs),
    "slurm": (SlurmSettings, SlurmJobs),
    "gke": (GkeSettings, GkeJobs),
}
# Where Hydra finds the doors to them: hydra.launcher._target_ is <DOORS>.<kind>.<class>.
DOORS = "hydra_plugins.maxhydra_launcher"


def make_backend(launcher: LauncherSettings, shared: Shared) -> JobBackend:
    return PLACES[launcher.kind][1](launcher, shared)


def read_launcher(told: Mapping[str, Any]) -> LauncherSettings:
    """The settings that `LauncherSettings.told` wrote down."""
    options = dict(told)
    kind = options.pop("kind")
    if kind not in PLACES:
        raise ConfigError(Problem("launcher", "no such place", kind, ", ".join(PLACES)))
    return PLACES[kind][0](**{name: _fixed(value) for name, value in options.items()})


def is_ours(node: DictConfig) -> bool:
    """Whether hydra.launcher leads to a place of this table."""
    return str(node._target_).startswith(f"{DOORS}.")


def launcher_settings(node: DictConfig) -> LauncherSettings:
    """The settings that hydra.launcher holds; this machine where it is a launcher of somebody else, Hydra's own too."""
    if not is_ours(node):
        return LocalSettings()
    options = OmegaConf.to_container(node, resolve=True)
    assert isinstance(options, dict)
    kind = options.pop("_target_").removeprefix(f"{DOORS}.").partition(".")[0]
    return read_launcher({"kind": kind, **{str(name): value for name, value in options.items()}})


def options(kind: str) -> dict[str, Any]:
    """Name -> default, as Hydra's config store takes them."""
    return {name: _open(value) for name, value in vars(PLACES[kind][0]()).items()}


def _open(value: Any) -> Any:
    """Lists for tuples; and mappings that take new keys, which Hydra forbids elsewhere."""
    if isinstance(value, dict):
        return OmegaConf.create(value, flags={"struct": False})
    return list(value) if isinstance(value, tuple) else value


def _fixed(value: Any) -> Any:
    """JSON and YAML have lists for what are tuples."""
    return tuple(_fixed(item) for item in value) if isinstance(value, list) else value
