"""Hydra launcher plugins hydra/launcher=local, slurm, gke and skypilot: a planned sweep, run by the controller."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from maxhydra.cli.main import RunFailed
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.registry import hydra_defaults


class SweepLauncher(Launcher):
    """Runs the jobs of a grid sweep, which the CLI has already validated and written to sweep.json."""

    def __init__(self, **settings: Any):
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # Slow to import, and not needed to list Hydra's plugins.
        from maxhydra.sweep.run import read_plan, resume_sweep  # noqa: PLC0415

        assert self._config is not None
        plan = read_plan(Path(self._config.hydra.sweep.dir).absolute())
        if len(plan.listed) != len(job_overrides):
            accepted = "hydra/sweeper=basic, hydra/sweeper=optuna"
            raise ConfigError(Problem("hydra.sweeper", "is not supported by this launcher", accepted=accepted))
        if reason := resume_sweep(plan, say=partial(print, flush=True), detach=plan.launcher.detached):
            raise RunFailed(reason)
        return []


class LocalLauncher(SweepLauncher):
    """Launches jobs of several processes on this machine; implemented in maxhydra.launch.local."""


class SlurmLauncher(SweepLauncher):
    """Launches jobs on a SLURM cluster; implemented in maxhydra.launch.slurm."""


class GkeLauncher(SweepLauncher):
    """Launches jobs as JobSets on a Kubernetes cluster; implemented in maxhydra.launch.gke."""


class SkypilotLauncher(SweepLauncher):
    """Tasks for SkyPilot, which `maxhydra launch render` prints; implemented in maxhydra.launch.skypilot."""


def register(kind: str, launcher: type[SweepLauncher]) -> None:
    """Register hydra/launcher=<kind>. Its keys and defaults are the fields of the launcher's settings class."""
    node = {"_target_": f"{__name__}.{launcher.__name__}", **hydra_defaults(kind)}
    ConfigStore.instance().store(group="hydra/launcher", name=kind, node=node, provider="maxhydra")


register("local", LocalLauncher)
register("slurm", SlurmLauncher)
register("gke", GkeLauncher)
register("skypilot", SkypilotLauncher)
