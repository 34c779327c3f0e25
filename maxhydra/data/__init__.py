"""Batches: a source gives rows by index, the loader puts them in order and onto the mesh."""

from maxhydra.data.batch import Batch, BatchSpec
from maxhydra.data.loader import Loader, eval_batches, train_loader
from maxhydra.data.tokenizers import Tokenizer, tokenizer

__all__ = ["Batch", "BatchSpec", "Loader", "Tokenizer", "eval_batches", "tokenizer", "train_loader"]
