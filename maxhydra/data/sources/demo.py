"""Plays of Shakespeare that ship with the package; see data/text/PROVENANCE.md."""

from pathlib import Path

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RowSource
from maxhydra.data.sources.text import read_files

TEXT = Path(__file__).parents[1] / "text" / "shakespeare.txt"


def files(corpus: Corpus, data: Data) -> list[Path]:
    return [TEXT]


def input_files(corpus: Corpus, data: Data) -> dict[str, list[Path]]:
    return {"source": [TEXT]}


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    return read_files(files(corpus, data), corpus, data, spec)
