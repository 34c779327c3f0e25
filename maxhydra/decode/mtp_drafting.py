"""Drafts of speculative decoding by the model's first multi-token prediction layer (DeepSeek-V3, 2024).

The layer gets the hidden state of the token before the last one and the last token, and drafts the next token. Further
drafts come from the same layer, which then gets its own hidden state and its own draft, as in vLLM. Drafts are greedy.

B rows, K drafts, D model width.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.decode.drafting import DraftCaches, Drafting, DraftInputs, Drafts, DraftWeights
from maxhydra.layers import Context, PageTable
from maxhydra.model import ModelDef
from maxhydra.model.mtp_cache import keep_hidden, last_hidden
from maxhydra.sharding import Sharder

Tree = Any


class MtpDrafter:
    """Drafts `drafting.tokens` tokens per row."""

    def __init__(self, model: ModelDef, drafting: Drafting, sharder: Sharder):
        self._model, self._num_drafts, self._sharder = model, drafting.tokens, sharder

    def draft(self, weights: DraftWeights, caches: DraftCaches, inputs: DraftInputs) -> tuple[Drafts, DraftCaches]:
        history, rows, adapters_B = inputs.history, inputs.rows, inputs.adapters_B

        def draft_next(carry: tuple[Tree, Any], number: jax.Array) -> tuple[tuple[Tree, Any], jax.Array]:
            cache, (hidden_B1D, token_B) = carry
            has_draft_B = number + 1 < history.remaining_N
            position_B1 = jnp.where(has_draft_B, history.last_N - 1 + number, -1)[:, None]
            ctx = Context(
                positions=position_B1,
                segments=(position_B1 >= 0).astype(jnp.int32),
                sharder=self._sharder,
                cache=cache,
                dropout_key=None,
                rows=rows,
                adapters_B=adapters_B,
            )
            hidden_B1D, cache = self._model.run_mtp_layer(weights.model, hidden_B1D, token_B[:, None], ctx)
            _, token_B = self._model.largest_logit(weights.model, hidden_B1D[:, 0], self._sharder)
            return (cache, (hidden_B1D, token_B)), token_B

        initial = caches.model, (last_hidden(caches.model, rows), history.last_token_N)
        (cache, _), draft_KB = jax.lax.scan(draft_next, initial, jnp.arange(self._num_drafts))
        return Drafts(draft_KB.T, history.remaining_N > 1), caches._replace(model=cache)

    def keep(
        self, caches: DraftCaches, hidden_BTD: jax.Array, positions_BT: jax.Array, last_B: jax.Array, rows: PageTable
    ) -> DraftCaches:
        """Keep the hidden state of the last accepted token for the next draft."""
        return caches._replace(model=keep_hidden(caches.model, hidden_BTD, positions_BT, last_B, rows))
