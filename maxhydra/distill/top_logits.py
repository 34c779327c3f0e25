"""The top-k logits of a teacher for the documents that task=teacher_logits writes."""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.data import Packing
from maxhydra.data import BatchSpec, make_batch
from maxhydra.data.packing import plan_rows
from maxhydra.data.rows import Document, pack_rows
from maxhydra.data.special_tokens import smallest_id_dtype
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import map_sequence_chunks
from maxhydra.train.loss import Batch, Tree


@dataclasses.dataclass(frozen=True)
class TopLogits:
    """Adds the k most likely next tokens to documents, which are packed into rows as in training."""

    model: ModelDef
    weights: Tree
    sharder: Sharder
    spec: BatchSpec
    packing: Packing
    k: int
    chunk: int

    def __call__(self, documents: list[Document]) -> list[Document]:
        """The documents in order, split if longer than a row, with columns `teacher_ids` and `teacher_logits`.

        `teacher_logits` are log-probabilities, which differ from the logits by a constant.
        """
        documents = [document for document in documents if document.num_targets]
        lengths = np.array([document.num_targets for document in documents], np.int64)
        pieces = plan_rows(lengths, self.spec.rows.seq_len, self.packing)
        rows = pack_rows(documents, pieces, self.spec.rows.seq_len, with_segments=True)
        outputs = [self._run([rows[index] for index in part]) for part in _chunks(len(rows), self.spec.batch)]
        if not outputs:
            return []
        ids, logits = (np.concatenate(arrays) for arrays in zip(*outputs, strict=True))
        enriched = []
        for piece in np.lexsort((pieces.start, pieces.document)):
            document, start, count = documents[pieces.document[piece]], pieces.start[piece], pieces.count[piece]
            positions = pieces.row[piece], slice(pieces.offset[piece], pieces.offset[piece] + count)
            tokens = slice(start, start + count + 1)
            weights = None if document.weights is None else document.weights[tokens]
            columns = {"teacher_ids": ids[positions], "teacher_logits": logits[positions]}
            enriched.append(Document(document.tokens[tokens], weights, columns))
        return enriched

    def _run(self, rows: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        padding = self.spec.batch - len(rows)
        empty = {name: np.zeros_like(column) for name, column in rows[0].items()}
        ids, logits = self._top_k(self.weights, make_batch([*rows, *[empty] * padding], self.spec, self.spec.batch))
        id_dtype = smallest_id_dtype(self.model.config.vocab_size)
        return np.asarray(ids)[: len(rows)].astype(id_dtype), np.asarray(logits)[: len(rows)].astype(np.float16)

    @cached_property
    def _top_k(self) -> Any:
        """Jitted (weights, batch) -> ids and log-probabilities, [B, S, k], replicated."""
        model, sharder = self.model, self.sharder

        def top_k(weights: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
            context = Context.of_batch(batch, sharder, None)
            hidden, _ = model.hidden(weights, batch["tokens"], context)

            def top_k_of(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
                logits = model.logits(weights, hidden, sharder).astype(jnp.float32)
                values, ids = jax.lax.top_k(jax.nn.log_softmax(logits), self.k)
                return ids, values

            return map_sequence_chunks(top_k_of, hidden, chunk=self.chunk)

        return jax.jit(top_k, out_shardings=sharder.sharding((None, None, None)))


def _chunks(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
