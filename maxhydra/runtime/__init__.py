"""What the run stands on: finds the hardware, sets flags and caches, joins the processes, starts the backend."""

from maxhydra.runtime.machine import Machine, start

__all__ = ["Machine", "start"]
