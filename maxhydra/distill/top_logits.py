"""The top of a teacher's distributions, for documents on their way into files."""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.data import Packing
from maxhydra.data import BatchSpec, make_batch
from maxhydra.data.document import Document
from maxhydra.data.packing import plan
from maxhydra.data.rows import pack_rows
from maxhydra.data.special_tokens import smallest
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import map_sequence_chunks
from maxhydra.train.step import Batch

Tree = Any


@dataclasses.dataclass(frozen=True)
class TopLogits:
    """The k likeliest tokens after each token of documents, packed into rows as they are for training."""

    model: ModelDef
    weights: Tree
    sharder: Sharder
    spec: BatchSpec
    packing: Packing
    k: int
    chunk: int

    def __call__(self, documents: list[Document]) -> list[Document]:
        """The documents in order, in pieces where they are longer than a row, with `teacher_ids` and
        `teacher_logits`: log-probabilities, of which any other logits differ by a constant."""
        documents = [document for document in documents if document.places]
        lengths = np.array([document.places for document in documents], np.int64)
        pieces = plan(lengths, self.spec.rows.seq_len, self.packing)
        rows = pack_rows(documents, pieces, self.spec.rows.seq_len, with_segments=True)
        found = [self._ask([rows[at] for at in part]) for part in _parts(len(rows), self.spec.batch)]
        if not found:
            return []
        ids, logits = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        enriched = []
        for piece in np.lexsort((pieces.start, pieces.document)):
            document, start, count = documents[pieces.document[piece]], pieces.start[piece], pieces.count[piece]
            places = pieces.row[piece], slice(pieces.offset[piece], pieces.offset[piece] + count)
            tokens = slice(start, start + count + 1)
            weights = None if document.weights is None else document.weights[tokens]
            columns = {"teacher_ids": ids[places], "teacher_logits": logits[places]}
            enriched.append(Document(document.tokens[tokens], weights, columns))
        return enriched

    def _ask(self, rows: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        missing = self.spec.batch - len(rows)
        empty = {name: np.zeros_like(column) for name, column in rows[0].items()}
        ids, logits = self._program(self.weights, make_batch([*rows, *[empty] * missing], self.spec, self.spec.batch))
        kind = smallest(self.model.config.vocab_size)
        return np.asarray(ids)[: len(rows)].astype(kind), np.asarray(logits)[: len(rows)].astype(np.float16)

    @cached_property
    def _program(self) -> Any:
        """(weights, batch) -> ids and log-probabilities, [B, S, k], on every device."""
        model, sharder = self.model, self.sharder

        def top(weights: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
            context = Context.of_batch(batch, sharder, None)
            hidden, _ = model.hidden(weights, batch["tokens"], context)

            def places(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
                wide = model.logits(weights, hidden, sharder).astype(jnp.float32)
                values, ids = jax.lax.top_k(jax.nn.log_softmax(wide), self.k)
                return ids, values

            return map_sequence_chunks(places, hidden, chunk=self.chunk)

        return jax.jit(top, out_shardings=sharder.sharding((None, None, None)))


def _parts(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
