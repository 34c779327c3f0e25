"""Job backends: the local machine, a SLURM cluster, a Kubernetes (GKE) cluster.

Each backend is a module with a `LauncherSettings` subclass, stored in sweep.json, and a `JobBackend`, which
starts, finds and stops jobs. The payload is the same everywhere: `maxhydra job` in a run folder chosen in advance.
"""
