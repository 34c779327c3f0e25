"""Sweeps: every job is validated before the first one starts, and all jobs share a folder chosen up front."""

import dataclasses
import itertools
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maxhydra.cli.main import import_run_job
from maxhydra.config.compose.composer import Composer, distinct, job_choices
from maxhydra.config.compose.hydra_loader import BASIC_LAUNCHER, BASIC_SWEEPER, Hydra, job_folder
from maxhydra.config.compose.overrides import expand, job_overrides, parse
from maxhydra.config.compose.validate import instantiate
from maxhydra.config.errors import ConfigError, Problem, quoted
from maxhydra.config.schema.run import new_name_problem
from maxhydra.launch.base import LauncherSettings
from maxhydra.launch.registry import launcher_settings, make_backend
from maxhydra.record import redact_argv
from maxhydra.record.storage import is_remote
from maxhydra.sweep.plan import Settings, SweepPlan, is_of_plan, write_plan


def run(app: Hydra, composer: Composer, overrides: list[str]) -> int:
    """Validate all jobs, fix their folders, and call Hydra's sweeper and launcher."""
    parsed = _parse(composer, overrides)
    controller, plan = _plan_jobs(composer, overrides, parsed)
    folder = Path(controller.hydra.sweep.dir)
    problem = new_name_problem(controller.run.name or "")
    if problem is not None and not folder.exists():
        raise ConfigError(problem)
    if plan is not None:
        make_backend(plan.launcher, plan.context)
        write_plan(plan)
    fixed = ["hydra.mode=MULTIRUN", *_folder_overrides(controller, parsed)]
    if plan is not None and _shows_table(controller, overrides):
        fixed.append("hydra/launcher=local")
    app.multirun(config_name=composer.config_name, task_function=run_sweep_job, overrides=[*overrides, *fixed])
    print(f"sweep: {controller.hydra.sweep.dir}")
    return 0


def run_sweep_job(node: DictConfig) -> float | None:
    """Run one job as Hydra's sweepers and launchers call it; returns the objective, which sweepers minimize."""
    config = instantiate(node)
    hydra = HydraConfig.get()
    overrides, choices = job_overrides(hydra), job_choices(hydra.runtime)
    execute = import_run_job().execute
    from maxhydra.runtime import signals  # noqa: PLC0415

    print(f"job {hydra.job.num}: {' '.join(redact_argv(overrides))}", flush=True)
    objective: float | None = execute(config, choices, overrides=overrides, path=Path(hydra.runtime.output_dir))
    if (name := signals.last_request()) is not None:
        # The signal arrived when the job was about to finish; it also asks the sweep to end.
        raise SystemExit(signals.exit_code(name))
    return objective


def make_plan(composer: Composer, overrides: list[str]) -> SweepPlan | None:
    """Return the validated plan of a sweep without starting it; None if its sweeper chooses jobs as it goes."""
    return _plan_jobs(composer, overrides, _parse(composer, overrides))[1]


def extend_plan(composer: Composer, plan: SweepPlan, overrides: list[str]) -> SweepPlan:
    """Return the plan of a grid sweep with jobs added: the new values of some keys, with all values of the others.

    The new jobs come after the existing ones, whose numbers and folders stay the same.
    """
    parsed = _parse(composer, overrides)
    new = {override.get_key_element(): expand([override], product=True) for override in parsed}
    choices = plan.choices | {key: [line for job in jobs for line in job] for key, jobs in new.items()}
    existing = [{_canonical(line) for line in job} for job in plan.listed]
    combinations = itertools.product(*choices.values())
    added = [list(job) for job in combinations if {_canonical(line) for line in job} not in existing]
    if not added:
        raise ConfigError(
            Problem("sweep extend", "adds no job: the sweep has all of these values", " ".join(overrides))
        )
    _check(composer, added)
    listed = (*plan.listed, *map(tuple, added))
    varied = dataclasses.replace(plan, listed=listed, folders=()).varied
    constant = [key for job in listed for key in (line.partition("=")[0] for line in job) if key not in varied]
    numbered = enumerate(added, start=len(plan.listed))
    folders = (*plan.folders, *(job_folder(number, job, constant) for number, job in numbered))
    settings = Settings(workers=plan.launcher.grid_workers(len(listed)))
    return dataclasses.replace(plan, listed=listed, folders=folders, settings=settings)


def _shows_table(controller: DictConfig, overrides: list[str]) -> bool:
    """True if jobs become processes, whose progress a table on the terminal shows: unless a launcher is requested.

    Hydra's default launcher runs jobs in this process, which prints their output.
    """
    is_requested = any(line.startswith("hydra/launcher=") for line in overrides)
    return sys.stdout.isatty() and not is_requested and controller.hydra.launcher._target_ == BASIC_LAUNCHER


def _canonical(line: str) -> tuple[str, float | str]:
    """Key and value of an override; 3e-3 and 0.003 are the same value."""
    key, _, value = line.partition("=")
    try:
        return key, float(value)
    except ValueError:
        return key, value


def _plan_jobs(composer: Composer, overrides: list[str], parsed: list[Override]) -> tuple[DictConfig, SweepPlan | None]:
    _check(composer, expand(parsed, product=False))
    controller = composer.loader.load_configuration(composer.config_name, overrides, RunMode.MULTIRUN)
    if is_remote(controller.run.outputs):
        hint = "start its runs one by one, or set run.outputs to a mounted folder"
        reason = "is a URL, which sweeps do not support"
        raise ConfigError(Problem("run.outputs", reason, controller.run.outputs, accepted="a local folder", hint=hint))
    if controller.hydra.sweeper.get("_target_") != BASIC_SWEEPER:
        return controller, None
    params = [f"{key}={value}" for key, value in (controller.hydra.sweeper.params or {}).items()]
    jobs = expand([*_parse(composer, params), *parsed], product=True)
    _check(composer, jobs)
    return controller, _plan(composer, controller, jobs, parsed)


def _parse(composer: Composer, overrides: list[str]) -> list[Override]:
    parsed = parse(overrides, composer.loader)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.overrides


def _check(composer: Composer, jobs: list[list[str]]) -> None:
    problems = [problem for each in jobs for problem in composer.check_overrides(each, with_hydra=False).problems]
    if problems:
        raise ConfigError(distinct(problems))


def _plan(composer: Composer, controller: DictConfig, jobs: list[list[str]], parsed: list[Override]) -> SweepPlan:
    """Return what `maxhydra sweep resume NAME` needs to continue the sweep if it is interrupted."""
    constant = _constant_keys(controller, parsed)
    launcher = _launcher(controller)
    return SweepPlan(
        folder=Path(controller.hydra.sweep.dir).absolute(),
        fixed=(),
        space={},
        listed=tuple(tuple(line for line in job if is_of_plan(line)) for job in jobs),
        folders=tuple(job_folder(number, job, constant) for number, job in enumerate(jobs)),
        objectives=(),
        settings=Settings(workers=launcher.grid_workers(len(jobs))),
        config_dir=composer.config_dir,
        launcher=launcher,
    )


def _launcher(controller: DictConfig) -> LauncherSettings:
    """Return the settings of our launcher. Any other launcher is called by Hydra, and `sweep resume` runs locally."""
    launcher = launcher_settings(controller.hydra.launcher)
    if problems := list(launcher.problems()):
        raise ConfigError(problems)
    return launcher


def _constant_keys(controller: DictConfig, parsed: list[Override]) -> list[str]:
    """Return the keys that have the same value in all jobs."""
    excluded = OmegaConf.to_container(controller.hydra.job.config.override_dirname.exclude_keys)
    assert isinstance(excluded, list)
    shared = [override.key_or_group for override in parsed if not override.is_sweep_override()]
    return list(dict.fromkeys([*map(str, excluded), *shared]))


def _folder_overrides(controller: DictConfig, parsed: list[Override]) -> list[str]:
    """Fix the sweep's folder, whose name may contain the time, and leave shared values out of the jobs' names."""
    excluded = ",".join(_constant_keys(controller, parsed))
    folder = quoted(str(controller.hydra.sweep.dir))
    return [f"hydra.sweep.dir={folder}", f"hydra.job.config.override_dirname.exclude_keys=[{excluded}]"]
