"""Doors through which Hydra comes to the places of maxhydra.launch: hydra/launcher=slurm, gke."""
