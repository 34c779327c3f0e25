"""What the run stands on: finds the hardware, sets flags and caches, joins the processes, starts the backend."""

from maxhydra.runtime.machine import Machine, original_environment, predict_hardware, start, start_on_host

__all__ = ["Machine", "original_environment", "predict_hardware", "start", "start_on_host"]
