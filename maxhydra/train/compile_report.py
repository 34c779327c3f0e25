"""Forwards to compile.py until every importer uses it."""

from maxhydra.train.compile import CompileReport, compile_report, traced_step  # noqa: F401
