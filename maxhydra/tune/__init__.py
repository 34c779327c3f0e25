"""Autotuning: the search space, the search order, trials in separate processes, and the resulting experiment."""
