"""What the run stands on: finds the hardware, sets flags and caches, joins the processes, starts the backend."""

from maxhydra.runtime.machine import Machine, environment_before, foreseen, start, start_on_host

__all__ = ["Machine", "environment_before", "foreseen", "start", "start_on_host"]
