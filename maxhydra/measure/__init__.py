"""Benchmarks of a config on this machine: speed and memory of training, decoding and kernels, as JSON records."""

from maxhydra.measure.record import BenchRecord, BenchTarget, OutOfMemoryError

__all__ = ["BenchRecord", "BenchTarget", "OutOfMemoryError"]
