"""Hydra launcher plugins for the backends in maxhydra.launch: hydra/launcher=slurm, gke."""
