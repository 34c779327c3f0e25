"""A mixture of sources: the pipeline opens each, with shares by data.weights or data.temperature."""

from typing import NoReturn

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.rows import RowSpec


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> NoReturn:
    raise TypeError("the pipeline opens the sources of a mixture one by one")
