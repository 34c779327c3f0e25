"""Several sources at once: the pipeline opens each, and data.weights or data.temperature say how much of each."""

from typing import NoReturn

from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.rows import RowSpec


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> NoReturn:
    raise TypeError("a mixture is opened source by source")
