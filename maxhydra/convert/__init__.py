"""Weights of other formats as ours and back. derive.py and tables/ need no jax; load.py loads from anywhere."""
