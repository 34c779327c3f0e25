"""Plays of Shakespeare that ship with the package; data/text/PROVENANCE.md says where they come from."""

from pathlib import Path

from maxhydra.config.data import Data
from maxhydra.data.batch import BatchSpec
from maxhydra.data.rows import Source
from maxhydra.data.sources.text import read_files

TEXT = Path(__file__).parents[1] / "text" / "shakespeare.txt"


def open_source(data: Data, spec: BatchSpec) -> Source:
    return read_files([TEXT], data, spec)
