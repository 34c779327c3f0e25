"""hydra/sweeper=optuna, implemented in maxhydra.sweep."""

from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from maxhydra.cli.main import RunFailed
from maxhydra.config.compose.overrides import parse
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.plug_ins import is_plug_in
from maxhydra.config.schema.metrics import unlogged_metric
from maxhydra.config.schema.run import Train
from maxhydra.launch.registry import LAUNCHERS, is_maxhydra_launcher, launcher_settings
from maxhydra.sweep.plan import Settings, SweepPlan, is_of_plan

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"

LISTS = [name for name, value in vars(Settings()).items() if isinstance(value, tuple)]


# The keys of hydra.sweeper and their defaults are the fields of Settings, which documents them.
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="optuna",
    node={
        "_target_": "hydra_plugins.maxhydra_optuna.OptunaSweeper",
        **{name: list(value) if name in LISTS else value for name, value in vars(Settings()).items()},
        "params": {},
    },
    provider="maxhydra",
)


class OptunaSweeper(Sweeper):
    """Validates the search, writes its plan to sweep.json, and runs it with maxhydra's controller."""

    def __init__(self, params: dict[str, str], **settings: Any):
        self._params, self._settings = params, settings
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config

    def sweep(self, arguments: list[str]) -> None:
        # Slow to import, and not needed to list Hydra's plugins.
        from maxhydra.sweep.run import start_sweep  # noqa: PLC0415
        from maxhydra.sweep.search import distributions, split_overrides  # noqa: PLC0415

        assert self._config is not None
        hydra = self._config.hydra
        settings = Settings(
            **{name: _as_tuple(value) if name in LISTS else value for name, value in self._plain_settings()}
        )
        problems = list(settings.problems())
        launcher = launcher_settings(hydra.launcher)
        problems += launcher.problems()
        if launcher.detached:
            reason = "a search needs results to choose the next trial"
            problems.append(Problem("hydra.launcher.detach", reason, value=True, accepted="false"))
        if hydra.launcher._target_ != BASIC_LAUNCHER and not is_maxhydra_launcher(hydra.launcher):
            accepted = ", ".join(f"hydra/launcher={name}" for name in ("basic", *LAUNCHERS))
            problems.append(Problem("hydra.launcher", "does not support hydra/sweeper=optuna", accepted=accepted))
        objectives = settings.objectives or (str(self._config.objective),)
        path = "hydra.sweeper.objectives" if settings.objectives else "objective"
        task, train = str(self._config.task.name), cast(Train, self._config.train)
        for name in objectives if not is_plug_in(task) else ():
            problems += unlogged_metric(path, name, task=task, train=train)
        params = [f"{key}={value}" for key, value in self._params.items()]
        fixed, space = split_overrides(parse([*params, *arguments], loader=None).overrides)
        if not space:
            hint = "optimizer.learning_rate='tag(log,interval(1e-4,1e-2))'"
            problems.append(Problem("hydra.sweeper", "has no key to search", hint=hint))
        try:
            distributions(space, grid=settings.sampler == "grid")
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        plan = SweepPlan(
            folder=Path(hydra.sweep.dir).absolute(),
            fixed=tuple(line for line in [*hydra.overrides.hydra, *fixed] if is_of_plan(line)),
            space=space,
            listed=(),
            folders=(),
            objectives=objectives,
            settings=settings,
            config_dir=_config_dir(hydra),
            launcher=launcher,
        )
        if reason := start_sweep(plan, say=partial(print, flush=True)):
            raise RunFailed(reason)

    def _plain_settings(self) -> list[tuple[str, Any]]:
        plain = OmegaConf.to_container(OmegaConf.create(self._settings))
        assert isinstance(plain, dict)
        return [(str(name), value) for name, value in plain.items()]


def _as_tuple(value: Any) -> tuple[str, ...]:
    """Convert a list or a single value: `objectives=eval/loss` is a list of one."""
    return tuple(map(str, value)) if isinstance(value, list) else () if value is None else (str(value),)


def _config_dir(hydra: DictConfig) -> str | None:
    """The folder passed as --config-dir, which jobs need too."""
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    return folders[0] if folders else None
