"""hydra/launcher=gke; what it does is maxhydra.launch.gke's."""

from hydra_plugins.maxhydra_launcher._base import SweepLauncher, register

register("gke", "GkeLauncher")


class GkeLauncher(SweepLauncher):
    """JobSets of a Kubernetes cluster."""
