"""Runs after the fact: the registry of all, and the reports of one and of many."""

from maxhydra.runs.export import frame
from maxhydra.runs.registry import Registry
from maxhydra.runs.report import write_report

__all__ = ["Registry", "frame", "write_report"]
