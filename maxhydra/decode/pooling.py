"""Pooled hidden states of token sequences: embeddings, and the scores of reward models.

Dimensions: B rows, T tokens of a row, D model width.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.decode import Pooling
from maxhydra.config.schema.model import Head
from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.weight_layout import WeightLayout
from maxhydra.layers import Context
from maxhydra.model import without_capacity_limit
from maxhydra.sharding import Sharder

# Smallest padded length, and the most rows of a call.
MIN_LENGTH, MAX_ROWS = 16, 8


class PoolingBatch(NamedTuple):
    """Rows of similar length, padded to the shape of a compiled program."""

    numbers: list[int]
    """Index of each sequence; rows behind them are padding."""
    tokens_BT: np.ndarray
    lengths_B: np.ndarray


class Pooler:
    """Programs that pool hidden states, compiled by the thread that asks for them and called by the engine's."""

    def __init__(self, layout: WeightLayout, sharder: Sharder):
        config = without_capacity_limit(layout.model.config)
        self._layout = dataclasses.replace(layout, model=dataclasses.replace(layout.model, config=config))
        self._sharder = sharder
        self._programs: dict[tuple[tuple[int, ...], Pooling], Any] = {}
        self._lock = threading.Lock()

    def batches(self, rows: List[List[int]]) -> Iterator[PoolingBatch]:
        """Split sequences into batches, shortest first to minimize padding."""
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        for start in range(0, len(order), MAX_ROWS):
            numbers = order[start : start + MAX_ROWS]
            length = 1 << (max(len(rows[numbers[-1]]), MIN_LENGTH) - 1).bit_length()
            shape = [
                -(-size // shards) * shards
                for size, shards in (
                    (1 << (len(numbers) - 1).bit_length(), self._sharder.num_shards("act_batch")),
                    (length, self._sharder.num_shards("act_length")),
                )
            ]
            tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[:1], np.int32)
            for row, number in enumerate(numbers):
                tokens[row, : len(rows[number])], lengths[row] = rows[number], len(rows[number])
            yield PoolingBatch(numbers, tokens, lengths)

    def program(self, weights: StepWeights, batch: PoolingBatch, pooling: Pooling) -> Callable[..., jax.Array]:
        """The compiled program of a batch, which maps weights, tokens and lengths to vectors [B, D]."""
        key = batch.tokens_BT.shape, pooling
        with self._lock:
            if key not in self._programs:
                jitted = jax.jit(self._function(pooling), out_shardings=self._sharder.sharding(()))
                self._programs[key] = jitted.lower(weights, batch.tokens_BT, batch.lengths_B).compile()
            return self._programs[key]

    def _function(self, pooling: Pooling) -> Callable[..., jax.Array]:
        layout, sharder, model = self._layout, self._sharder, self._layout.model

        def pool(weights: StepWeights, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
            params, index_T = weights.used(layout), jnp.arange(tokens_BT.shape[1])
            is_token_BT = index_T < lengths_B[:, None]
            context = Context(
                positions=jnp.where(is_token_BT, index_T, 0),
                segments=is_token_BT.astype(jnp.int32),
                sharder=sharder,
                cache=None,
                dropout_key=None,
                # The slot 0 of the stacks is the model without an adapter.
                adapters_B=None if weights.stacks is None else jnp.zeros(tokens_BT.shape[0], jnp.int32),
            )
            hidden_BTD = model.forward(params, tokens_BT, context).hidden_BTD
            is_last_BT = index_T == lengths_B[:, None] - 1
            if model.config.head is Head.score:
                scores_BT = model.scores(params, hidden_BTD)
                return jnp.sum(jnp.where(is_last_BT, scores_BT, 0), axis=1, keepdims=True)
            chosen_BT = is_last_BT if pooling is Pooling.last else is_token_BT
            pooled_BD = jnp.sum(jnp.where(chosen_BT[..., None], hidden_BTD.astype(jnp.float32), 0), axis=1)
            return pooled_BD / jnp.maximum(jnp.linalg.norm(pooled_BD, axis=-1, keepdims=True), 1e-12)

        return pool
