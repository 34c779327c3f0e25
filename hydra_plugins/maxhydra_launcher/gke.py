"""hydra/launcher=gke; what it does is maxhydra.launch.gke's."""

from hydra_plugins.maxhydra_launcher._base import Door, register

register("gke", "GkeLauncher")


class GkeLauncher(Door):
    """JobSets of a Kubernetes cluster."""
