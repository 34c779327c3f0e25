"""Places where jobs run: this machine, a SLURM cluster, a Kubernetes cluster.

A place is a module with its settings, which a sweep keeps in sweep.json, and its `Jobs`, which start, find and end jobs
there. What runs is the same everywhere: `maxhydra job`, in a folder that was fixed beforehand.
"""
