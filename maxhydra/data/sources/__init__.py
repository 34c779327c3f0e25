"""Where rows come from. A module of this package is one kind of source, chosen by data.source.

Each has `open_source(data, spec) -> Source`.
"""

import importlib

from maxhydra.config.data import Data
from maxhydra.data.batch import BatchSpec
from maxhydra.data.rows import Source


def open_source(data: Data, spec: BatchSpec) -> Source:
    """The source that the config names."""
    opened: Source = importlib.import_module(f"{__name__}.{data.source}").open_source(data, spec)
    return opened
