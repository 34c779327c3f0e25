"""The door through which Hydra comes to a search; what it does is maxhydra.sweep's."""

from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from maxhydra.cli.main import RunFailed
from maxhydra.config.compose.overrides import parse
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.metrics import unlogged
from maxhydra.launch.registry import PLACES, is_ours, launcher_settings
from maxhydra.sweep.plan import Settings, SweepPlan

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"

LISTS = [name for name, value in vars(Settings()).items() if isinstance(value, tuple)]


# The keys of hydra.sweeper and their defaults are those of Settings, which says what they mean.
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="optuna",
    node={
        "_target_": "hydra_plugins.maxhydra_sweeper.optuna.OptunaSweeper",
        **{name: list(value) if name in LISTS else value for name, value in vars(Settings()).items()},
        "params": {},
    },
    provider="maxhydra",
)


class OptunaSweeper(Sweeper):
    """Plans the sweep, writes the plan down, and hands over."""

    def __init__(self, params: dict[str, str], **settings: Any):
        self._params, self._settings = params, settings
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config

    def sweep(self, arguments: list[str]) -> None:
        # Heavy, and not needed by whoever only lists Hydra's plugins.
        from maxhydra.sweep.run import begin  # noqa: PLC0415
        from maxhydra.sweep.space import distributions, split  # noqa: PLC0415

        assert self._config is not None
        hydra = self._config.hydra
        settings = Settings(**{name: _several(value) if name in LISTS else value for name, value in self._plain()})
        problems = list(settings.problems())
        launcher = launcher_settings(hydra.launcher)
        problems += launcher.problems()
        if launcher.detached:
            reason = "a search waits for results to know what to try next"
            problems.append(Problem("hydra.launcher.detach", reason, value=True, accepted="false"))
        if hydra.launcher._target_ != BASIC_LAUNCHER and not is_ours(hydra.launcher):
            accepted = ", ".join(f"hydra/launcher={name}" for name in ("basic", *PLACES) if name != "local")
            problems.append(Problem("hydra.launcher", "does not serve hydra/sweeper=optuna", accepted=accepted))
        objectives = settings.objectives or (str(self._config.objective),)
        path = "hydra.sweeper.objectives" if settings.objectives else "objective"
        task, evaluates = str(self._config.task.name), self._config.train.eval_batches > 0
        for name in objectives:
            problems += unlogged(path, name, task=task, evaluates=evaluates)
        params = [f"{key}={value}" for key, value in self._params.items()]
        fixed, space = split(parse([*params, *arguments], loader=None).overrides)
        if not space:
            hint = "optimizer.learning_rate='tag(log,interval(1e-4,1e-2))'"
            problems.append(Problem("hydra.sweeper", "has nothing to search", hint=hint))
        try:
            distributions(space, grid=settings.sampler == "grid")
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        plan = SweepPlan(
            folder=Path(hydra.sweep.dir).absolute(),
            fixed=tuple(line for line in fixed if not line.startswith(("hydra", "run.name=", "run.outputs="))),
            space=space,
            listed=(),
            folders=(),
            objectives=objectives,
            settings=settings,
            config_dir=_config_dir(hydra),
            launcher=launcher,
        )
        if reason := begin(plan, say=partial(print, flush=True)):
            raise RunFailed(reason)

    def _plain(self) -> list[tuple[str, Any]]:
        plain = OmegaConf.to_container(OmegaConf.create(self._settings))
        assert isinstance(plain, dict)
        return [(str(name), value) for name, value in plain.items()]


def _several(value: Any) -> tuple[str, ...]:
    """A list; `objectives=eval/loss` is a list of one."""
    return tuple(map(str, value)) if isinstance(value, list) else () if value is None else (str(value),)


def _config_dir(hydra: DictConfig) -> str | None:
    """The folder of --config-dir, which jobs need too."""
    given = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    return given[0] if given else None
