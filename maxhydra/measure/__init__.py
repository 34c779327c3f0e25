"""Benchmarks of a config on this machine: speed and memory of training, decoding and kernels, as JSON records."""

from maxhydra.measure.memory import OutOfMemoryError
from maxhydra.measure.record import BenchRecord, BenchTarget

__all__ = ["BenchRecord", "BenchTarget", "OutOfMemoryError"]
