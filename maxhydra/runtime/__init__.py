"""Start-up of jax: detect the hardware, set flags and caches, connect the processes, start the backend."""

from maxhydra.runtime.machine import Machine, original_environment, predict_hardware, start, start_on_host

__all__ = ["Machine", "original_environment", "predict_hardware", "start", "start_on_host"]
