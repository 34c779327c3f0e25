"""Stored runs: the registry of all runs, and reports of one or many."""

from maxhydra.runs.export import frame
from maxhydra.runs.registry import Registry
from maxhydra.runs.report import write_report

__all__ = ["Registry", "frame", "write_report"]
