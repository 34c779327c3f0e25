"""C4 as in MLPerf GPT-3 training: tfds builds in a fixed order, with a tokenized evaluation set.

Training reads text (c4/en:3.0.4, split train2). Evaluation reads `ids` (c4/en:3.0.5, validation_tokenized_5662seqs):
whole sequences padded with 0, one per row. As in MLPerf, predicting the end token has no loss. An evaluation split of
text (c4/en:3.0.4, validation_24567exp) is tokenized and packed like the training text.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.record_types import Rejected
from maxhydra.data.records import Record
from maxhydra.data.rows import Row, RowSpec, make_row
from maxhydra.data.sources import RecordSource, columns_of, hold_out
from maxhydra.data.sources.tfds import find_build, input_files, open_split
from maxhydra.data.tokenizers import load_tokenizer

__all__ = ["input_files", "open_source"]

IDS = "ids"


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    assert corpus.name is not None
    columns = columns_of(corpus)
    train = open_split(find_build(corpus.name, corpus.data_dir), corpus.split, columns, data.cache)
    if corpus.eval_split is None:
        return hold_out(train, corpus.eval_fraction)
    held_out = find_build(corpus.eval_name or corpus.name, corpus.data_dir)
    if IDS not in held_out.features:
        return RecordSource(train=train, evaluation=open_split(held_out, corpus.eval_split, columns, data.cache))
    return RecordSource(
        train=train,
        evaluation=open_split(held_out, corpus.eval_split, (IDS,), data.cache),
        evaluation_record_type=TokenizedSequences(spec.seq_len, load_tokenizer(data).eos),
    )


@dataclasses.dataclass(frozen=True)
class TokenizedSequences:
    """Record type of tokenized sequences, one per row."""

    seq_len: int
    eos: int | None
    packs = False

    def encode(self, records: Sequence[Record]) -> list[Any]:
        return [self._tokens(np.asarray(record[IDS])) for record in records]

    def _tokens(self, ids: np.ndarray) -> np.ndarray | Rejected:
        tokens = np.trim_zeros(ids, "b")
        if len(tokens) < 2:
            return Rejected(f"has {len(tokens)} tokens; at least 2 are needed")
        if len(tokens) > self.seq_len + 1:
            return Rejected(f"has {len(tokens)} tokens, more than train.seq_len + 1 = {self.seq_len + 1}")
        return tokens

    def row(self, example: Any, seq_len: int) -> Row:
        row = make_row(example, seq_len)
        row["positions"] = np.where(row["weights"] > 0, row["positions"], 0)
        if self.eos is not None:
            row["weights"] = np.where(row["targets"] == self.eos, np.float32(0), row["weights"])
        return row
