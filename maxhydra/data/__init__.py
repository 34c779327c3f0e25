"""Batches: sources give records or rows, shapes make documents, packing makes rows, the loader makes batches."""

from maxhydra.data.batch import Batch, BatchSpec
from maxhydra.data.evaluation import eval_batches
from maxhydra.data.loader import Loader, host_loader, train_loader
from maxhydra.data.rows import Row, RowSpec
from maxhydra.data.tokenizers import Tokenizer, tokenizer

__all__ = [
    "Batch",
    "BatchSpec",
    "Loader",
    "Row",
    "RowSpec",
    "Tokenizer",
    "eval_batches",
    "host_loader",
    "tokenizer",
    "train_loader",
]
