"""The command line. Nothing here imports jax before a run starts, and --help does not import Hydra."""
