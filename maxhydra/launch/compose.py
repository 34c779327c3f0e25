"""Compose the config of a trial with Hydra. Separate from job_spec.py, which workers import without Hydra."""

from pathlib import Path

from maxhydra.config.compose.composer import Composer
from maxhydra.config.compose.overrides import searchpath
from maxhydra.launch.base import SweepContext, Trial
from maxhydra.launch.job_spec import JobSpec


def job_composer(sweep: SweepContext, trial: Trial) -> Composer:
    """The composer of the jobs of a sweep, which share the folders of options."""
    return Composer(sweep.config_dir, searchpath=searchpath(sweep.overrides(trial)))


def compose_job(composer: Composer, sweep: SweepContext, trial: Trial) -> JobSpec:
    """Compose and validate a trial's config. `composer` caches the config files that the jobs of a sweep share."""
    overrides = sweep.overrides(trial)
    composed = composer.check_overrides(overrides, with_hydra=False).composed()
    # The worker runs in another working directory.
    config_dir = None if sweep.config_dir is None else str(Path(sweep.config_dir).expanduser().absolute())
    return JobSpec(composed.config, composed.choices, overrides, config_dir)
