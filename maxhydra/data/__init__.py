"""Input pipeline: sources yield records or rows, record types tokenize, packing fills rows, a loader makes batches."""

from maxhydra.data.batch import Assemble, Batch, BatchSpec, local_rows, make_batch
from maxhydra.data.loader import Loader, eval_batches, held_out, host_loader, open_loader, train_loader
from maxhydra.data.rows import Row, RowSpec
from maxhydra.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "Assemble",
    "Batch",
    "BatchSpec",
    "Loader",
    "Row",
    "RowSpec",
    "Tokenizer",
    "eval_batches",
    "held_out",
    "host_loader",
    "load_tokenizer",
    "local_rows",
    "make_batch",
    "open_loader",
    "train_loader",
]
