"""maxhydra from Python: compose a config, run it in this process, read runs, load their weights. See docs/library.md.

jax is imported when a run starts or weights are loaded.
"""

from maxhydra.library.execution import RunResult, compose, run
from maxhydra.library.stored_run import Series, StoredRun, load_run

__all__ = ["RunResult", "Series", "StoredRun", "compose", "load_run", "run"]
