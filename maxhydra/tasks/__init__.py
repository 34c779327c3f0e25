"""Tasks by name: `task.name` is a module here with a function `run(job)`; `_runner.py` runs it and records the run."""

from maxhydra.tasks._runner import Job, Outcome, Result, atomic_output_dir, run

__all__ = ["Job", "Outcome", "Result", "atomic_output_dir", "run"]
