"""The command line. Nothing here imports jax, and help answers before Hydra is imported."""
