"""hydra/launcher=slurm, implemented in maxhydra.launch.slurm."""

from hydra_plugins.maxhydra_launcher._base import SweepLauncher, register

register("slurm", "SlurmLauncher")


class SlurmLauncher(SweepLauncher):
    """Launches jobs on a SLURM cluster."""
