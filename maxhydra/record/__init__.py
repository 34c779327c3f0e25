"""The run folder on disk: config, provenance, status, metrics and log of a run. Does not import jax."""

from maxhydra.record.log import FILE_ONLY, logging_to
from maxhydra.record.metrics import MetricsWriter, NullMetricsWriter, read_metrics, scan_metrics, series
from maxhydra.record.provenance import environment
from maxhydra.record.redact import redact_argv, redact_text
from maxhydra.record.run_dir import RunDirectory, RunInUseError

__all__ = [
    "FILE_ONLY",
    "MetricsWriter",
    "NullMetricsWriter",
    "RunDirectory",
    "RunInUseError",
    "environment",
    "logging_to",
    "read_metrics",
    "redact_argv",
    "redact_text",
    "scan_metrics",
    "series",
]
