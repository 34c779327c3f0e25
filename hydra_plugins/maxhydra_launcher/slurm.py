"""hydra/launcher=slurm; what it does is maxhydra.launch.slurm's."""

from hydra_plugins.maxhydra_launcher._base import Door, register

register("slurm", "SlurmLauncher")


class SlurmLauncher(Door):
    """Jobs of a SLURM cluster."""
