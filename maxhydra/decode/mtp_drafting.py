"""Drafts of speculative decoding by the model's first multi-token prediction layer (DeepSeek-V3, 2024).

The layer gets the hidden state of the token before the last one and the last token, and drafts the next token. Further
drafts come from the same layer, which then gets its own hidden state and its own draft, as in vLLM. Drafts are greedy.

B rows, K drafts, D model width.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.decode.drafting import Drafting, TokenHistory
from maxhydra.layers import Context, PageTable
from maxhydra.model import ModelDef
from maxhydra.model.mtp_cache import last_hidden
from maxhydra.sharding import Sharder

Tree = Any


class MtpDrafter:
    """Drafts `drafting.tokens` tokens per row."""

    def __init__(self, model: ModelDef, drafting: Drafting, sharder: Sharder):
        self._model, self._num_drafts, self._sharder = model, drafting.tokens, sharder

    def __call__(
        self, weights: Tree, cache: Tree, history: TokenHistory, rows: PageTable, adapters_B: jax.Array | None
    ) -> tuple[tuple[jax.Array, jax.Array], Tree]:
        """Draft tokens [B, K]; also return which rows have drafts [B], and the cache.

        The cache's entries of drafted tokens are approximate, and overwritten by the step that verifies the drafts.
        """

        def draft(carry: tuple[Tree, Any], number: jax.Array) -> tuple[tuple[Tree, Any], jax.Array]:
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
            hidden_B1D, cache = self._model.run_mtp_layer(weights, hidden_B1D, token_B[:, None], ctx)
            _, token_B = self._model.largest_logit(weights, hidden_B1D[:, 0], self._sharder)
            return (cache, (hidden_B1D, token_B)), token_B

        initial = cache, (last_hidden(cache, rows), history.last_token_N)
        (cache, _), draft_KB = jax.lax.scan(draft, initial, jnp.arange(self._num_drafts))
        return (draft_KB.T, history.remaining_N > 1), cache
