"""Weights of other formats as ours, and ours from disk."""

from maxhydra.convert.load import load_weights

__all__ = ["load_weights"]
