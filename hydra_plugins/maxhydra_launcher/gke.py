"""hydra/launcher=gke, implemented in maxhydra.launch.gke."""

from hydra_plugins.maxhydra_launcher._base import SweepLauncher, register

register("gke", "GkeLauncher")


class GkeLauncher(SweepLauncher):
    """Launches jobs as JobSets on a Kubernetes cluster."""
