"""maxhydra: train and run language models in JAX, as Hydra experiments."""

__version__ = "0.1.0"
