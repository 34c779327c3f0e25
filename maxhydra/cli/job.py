"""One job as Hydra, its sweepers and its launchers call it: a composed config in, the objective out."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maxhydra.config.compose.composer import job_choices
from maxhydra.config.compose.validate import instantiate
from maxhydra.config.errors import ConfigError, Problem

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def run(node: DictConfig) -> float | None:
    """Run the task; returns the objective, which sweepers minimise."""
    config = instantiate(node)
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN and hydra.launcher._target_ != BASIC_LAUNCHER:
        name = hydra.runtime.choices["hydra/launcher"]
        hint = f"maxhydra -m hydra/launcher={name} ... submits; a sweep of one job is fine"
        raise ConfigError(Problem("hydra/launcher", "launches the jobs of -m alone", value=name, hint=hint))
    overrides, choices = _typed(hydra.overrides.task), job_choices(hydra.runtime)
    # jax comes in here, and not before the config is valid.
    from maxhydra.cli.run_job import execute  # noqa: PLC0415

    if hydra.mode is RunMode.MULTIRUN:
        print(f"job {hydra.job.num}: {' '.join(overrides)}", flush=True)
        return execute(config, choices, overrides=overrides, path=Path(hydra.runtime.output_dir))
    return execute(config, choices, overrides=overrides, path=None)


def _typed(overrides: list[str]) -> list[str]:
    """As they were given, not as they come out: `${...}` may mean another value when the run is started again."""
    given = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(given, list)
    return given
