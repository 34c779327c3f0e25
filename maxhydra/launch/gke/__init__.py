"""Jobs on Google Kubernetes Engine: one JobSet per job, with its config in a ConfigMap owned by the JobSet.

Pods need neither Hydra nor access to the Kubernetes API. If the run folder is not visible from outside the cluster, the
result comes back as the pod's termination message.
"""

from maxhydra.launch.gke.jobs import GkeJobs
from maxhydra.launch.gke.settings import GkeSettings

__all__ = ["GkeJobs", "GkeSettings"]
