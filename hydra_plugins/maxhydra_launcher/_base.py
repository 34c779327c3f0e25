"""What every door does: hand the sweep that was planned to its controller."""

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
from maxhydra.launch.registry import options


def register(kind: str, door: str) -> None:
    """Tell Hydra of hydra/launcher=<kind>. Keys and defaults are those of the place's settings, which explain them."""
    target = f"hydra_plugins.maxhydra_launcher.{kind}.{door}"
    node = {"_target_": target, **options(kind)}
    ConfigStore.instance().store(group="hydra/launcher", name=kind, node=node, provider="maxhydra")


class SweepLauncher(Launcher):
    """The jobs of a plain sweep are in its plan already, each of them checked; what is left of it is run here."""

    def __init__(self, **settings: Any):
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # Heavy, and not needed by whoever only lists Hydra's plugins.
        from maxhydra.sweep.run import read_plan, resume_sweep  # noqa: PLC0415

        assert self._config is not None
        plan = read_plan(Path(self._config.hydra.sweep.dir).absolute())
        if len(plan.listed) != len(job_overrides):
            accepted = "hydra/sweeper=basic, hydra/sweeper=optuna"
            raise ConfigError(Problem("hydra.sweeper", "does not go with this launcher", accepted=accepted))
        if reason := resume_sweep(plan, say=partial(print, flush=True), detach=plan.launcher.detached):
            raise RunFailed(reason)
        return []
