"""Sweeps: every job is checked before the first starts, and the controller fixes the folder that they share."""

from pathlib import Path

from hydra._internal.hydra import Hydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maxhydra.cli import job
from maxhydra.config.compose.composer import Composer, distinct
from maxhydra.config.compose.overrides import expand, parse
from maxhydra.config.compose.resolvers import job_folder
from maxhydra.config.errors import ConfigError, quoted
from maxhydra.launch.local import LocalSettings
from maxhydra.launch.registry import launcher_settings
from maxhydra.launch.settings import LauncherSettings
from maxhydra.sweep.plan import Settings, SweepPlan, write_plan

# Of a job, set anew for each.
FIXED = ("run.name=", "run.outputs=", "hydra.", "hydra/")
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def run(app: Hydra, composer: Composer, overrides: list[str]) -> int:
    """Check, fix the folders, and hand over to Hydra's sweeper and launcher."""
    parsed = _parsed(composer, overrides)
    controller, plan = _planned(composer, overrides, parsed)
    if plan is not None:
        write_plan(plan)
    fixed = ["hydra.mode=MULTIRUN", *_folders(controller, parsed)]
    app.multirun(config_name=composer.config_name, task_function=job.run, overrides=[*overrides, *fixed])
    print(f"sweep: {controller.hydra.sweep.dir}")
    return 0


def planned(composer: Composer, overrides: list[str]) -> SweepPlan | None:
    """A sweep that is checked, and not begun; no plan where a sweeper makes its own."""
    return _planned(composer, overrides, _parsed(composer, overrides))[1]


def is_asked(overrides: list[str]) -> bool:
    """Whether hydra.mode asks for a sweep in place of the flag."""
    return "hydra.mode=MULTIRUN" in overrides


def _planned(composer: Composer, overrides: list[str], parsed: list[Override]) -> tuple[DictConfig, SweepPlan | None]:
    _check(composer, expand(parsed, product=False))
    controller = composer.loader.load_configuration(composer.config_name, overrides, RunMode.MULTIRUN)
    if controller.hydra.sweeper.get("_target_") != BASIC_SWEEPER:
        return controller, None
    params = [f"{key}={value}" for key, value in (controller.hydra.sweeper.params or {}).items()]
    jobs = expand([*_parsed(composer, params), *parsed], product=True)
    _check(composer, jobs)
    return controller, _plan(composer, controller, jobs, parsed)


def _parsed(composer: Composer, overrides: list[str]) -> list[Override]:
    parsed = parse(overrides, composer.loader)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.overrides


def _check(composer: Composer, jobs: list[list[str]]) -> None:
    problems = [problem for each in jobs for problem in composer.examine(each, with_hydra=False).problems]
    if problems:
        raise ConfigError(distinct(problems))


def _plan(composer: Composer, controller: DictConfig, jobs: list[list[str]], parsed: list[Override]) -> SweepPlan:
    """Keep what is needed to go on with the sweep, should it be cut short: `maxhydra sweep resume NAME`."""
    constant = _constant(controller, parsed)
    launcher = _launcher(controller)
    return SweepPlan(
        folder=Path(controller.hydra.sweep.dir).absolute(),
        fixed=(),
        space={},
        listed=tuple(tuple(line for line in job if not line.startswith(FIXED)) for job in jobs),
        folders=tuple(job_folder(number, job, constant) for number, job in enumerate(jobs)),
        objectives=(),
        # A cluster decides itself how many run at a time, and which first.
        settings=Settings() if launcher.kind == LocalSettings.kind else Settings(workers=len(jobs)),
        config_dir=composer.config_dir,
        launcher=launcher,
    )


def _launcher(controller: DictConfig) -> LauncherSettings:
    """Where the jobs run. One that is not ours is Hydra's to call, and `sweep resume` goes on here."""
    launcher = launcher_settings(controller.hydra.launcher)
    if problems := list(launcher.problems()):
        raise ConfigError(problems)
    return launcher


def _constant(controller: DictConfig, parsed: list[Override]) -> list[str]:
    """Keys that do not tell jobs apart."""
    listed = OmegaConf.to_container(controller.hydra.job.config.override_dirname.exclude_keys)
    assert isinstance(listed, list)
    shared = [override.key_or_group for override in parsed if not override.is_sweep_override()]
    return list(dict.fromkeys([*map(str, listed), *shared]))


def _folders(controller: DictConfig, parsed: list[Override]) -> list[str]:
    """The time in the sweep's name is read once, here; a job's name leaves out what all jobs share."""
    excluded = ",".join(_constant(controller, parsed))
    folder = quoted(str(controller.hydra.sweep.dir))
    return [f"hydra.sweep.dir={folder}", f"hydra.job.config.override_dirname.exclude_keys=[{excluded}]"]
