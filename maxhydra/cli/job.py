"""One job: the composed config becomes a run, and what came of it is said."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from maxhydra.cli.errors import RunFailed
from maxhydra.config.compose import job_choices
from maxhydra.config.validate import instantiate


def run(node: DictConfig) -> float | None:
    """Run the task; returns the objective, which sweepers minimise. jax is imported here and not before."""
    config = instantiate(node)
    hydra = HydraConfig.get()
    in_sweep = hydra.mode is RunMode.MULTIRUN
    if in_sweep:
        print(f"job {hydra.job.num}: {' '.join(hydra.overrides.task)}", flush=True)
    path = Path(hydra.runtime.output_dir) if in_sweep else None
    from maxhydra import tasks  # noqa: PLC0415

    result = tasks.run(config, choices=job_choices(hydra.runtime), path=path)
    if result.status == "failed":
        raise RunFailed(result.reason)
    return result.objective
