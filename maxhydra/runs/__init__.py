"""Runs after the fact: the report of one."""

from maxhydra.runs.report import write_report

__all__ = ["write_report"]
