"""Jobs of a SLURM cluster.

SLURM's own commands are called directly. submitit, the usual way from Python, pickles a function as the payload, learns
states from accounting alone, which small clusters lack, and knows no job before it has its id; here the payload is a
plain command over srun, squeue is asked, and a job is known by a name that was written down before it was submitted.
"""

from maxhydra.launch.slurm.jobs import SlurmJobs
from maxhydra.launch.slurm.settings import SlurmSettings

__all__ = ["SlurmJobs", "SlurmSettings"]
