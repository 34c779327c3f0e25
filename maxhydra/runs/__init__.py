"""Stored runs: the registry of all runs, and reports of one or many.

The package is also a function of the library: `maxhydra.runs("status=finished", "eval/loss<2")` returns the runs that
`maxhydra runs list` with these conditions shows, newest first.
"""

import sys
from pathlib import Path
from types import ModuleType

from maxhydra.runs.export import frame
from maxhydra.runs.query import select_runs
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.report import write_report

__all__ = ["Registry", "frame", "write_report"]


class _CallableModule(ModuleType):
    def __call__(self, *conditions: str, outputs: Path | str = "outputs") -> list[Run]:
        """Return the runs below `outputs` that match all conditions."""
        registry = Registry(outputs)
        try:
            return select_runs(registry, conditions)
        finally:
            registry.close()


sys.modules[__name__].__class__ = _CallableModule
