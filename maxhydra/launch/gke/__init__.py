"""Jobs on Google Kubernetes Engine: each a JobSet, with its config in a ConfigMap that goes when the JobSet goes.

What a pod runs needs neither Hydra nor the Kubernetes API. How it ended comes back as the pod's last words, where the
folder of the run cannot be seen from outside.
"""

from maxhydra.launch.gke.jobs import GkeJobs
from maxhydra.launch.gke.settings import GkeSettings

__all__ = ["GkeJobs", "GkeSettings"]
