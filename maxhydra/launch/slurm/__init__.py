"""Jobs on a SLURM cluster.

SLURM's commands are called directly instead of through submitit, which pickles a function as the payload, reads job
states only from accounting, which small clusters lack, and does not know a job before it has an id. Here the payload is
a plain command run by srun, states come from squeue, and a job is identified by a name recorded before submission.
"""

from maxhydra.launch.slurm.jobs import SlurmJobs
from maxhydra.launch.slurm.settings import SlurmSettings

__all__ = ["SlurmJobs", "SlurmSettings"]
