"""hydra/launcher=slurm; what it does is maxhydra.launch.slurm's."""

from hydra_plugins.maxhydra_launcher._base import SweepLauncher, register

register("slurm", "SlurmLauncher")


class SlurmLauncher(SweepLauncher):
    """Jobs of a SLURM cluster."""
