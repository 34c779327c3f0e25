"""Log-probabilities of the tokens of a prompt, computed with its prefill.

B rows, T tokens per row, S tokens of a slice, V vocabulary, D model width.
"""

from collections.abc import Sequence as List
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.request import TokenLogprob
from maxhydra.decode.sampler import SampledTokens, score
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

# Tokens of all rows whose logits are in memory at a time; a prefill call has at least 16 tokens per row.
SLICE_TOKENS, MIN_SLICE = 256, 16


def score_prompts(
    model: ModelDef, params: Any, hidden_BTD: jax.Array, targets_BT: jax.Array, sharder: Sharder
) -> SampledTokens:
    """Return the log-probabilities [B, T] of the targets, each the token after one of the inputs."""
    B, T, D = hidden_BTD.shape
    S = min(T, max(MIN_SLICE, SLICE_TOKENS // B))

    def score_slice(each: tuple[jax.Array, jax.Array]) -> SampledTokens:
        hidden_BSD, targets_BS = each
        logits_BSV = model.logits(params, hidden_BSD, sharder).astype(jnp.float32)
        scored = score(logits_BSV.reshape(B * S, -1), targets_BS.reshape(-1), alternatives=True)
        return jax.tree.map(lambda x: x.reshape(B, S, *x.shape[1:]), scored)

    slices = hidden_BTD.reshape(B, T // S, S, D).swapaxes(0, 1), targets_BT.reshape(B, T // S, S).swapaxes(0, 1)
    scored = jax.lax.map(score_slice, slices)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, T, *x.shape[3:]), scored)


class PendingScores(NamedTuple):
    """Log-probabilities of a prefill call that were not read yet."""

    rows: List[PrefillChunk | None]
    scores: SampledTokens
    version: int
    """Version of the weights."""

    def deliver(self) -> None:
        """Wait for the log-probabilities, and add them to the sequences that requested them."""
        scores = jax.tree.map(np.asarray, self.scores)
        for row, chunk in enumerate(self.rows):
            if chunk is None or not chunk.sequence.is_scored:
                continue
            request = chunk.sequence.request
            # The token after the prompt is sampled.
            count = min(chunk.stop, len(request.prompt) - 1) - chunk.start
            chunk.sequence.prompt_logprobs += [
                token_logprob(scores, (row, step), request.prompt_logprobs or 0, self.version) for step in range(count)
            ]


def token_logprob(sampled: SampledTokens, index: tuple[int, int], num_alternatives: int, version: int) -> TokenLogprob:
    """Return the log-probabilities of the token at (step, row)."""
    assert sampled.logprob_B is not None
    assert sampled.alternatives_BA is not None and sampled.alternative_logprobs_BA is not None
    tokens, logprobs = sampled.alternatives_BA[index], sampled.alternative_logprobs_BA[index]
    pairs = zip(tokens[:num_alternatives], logprobs[:num_alternatives], strict=True)
    alternatives = tuple((int(token), float(logprob)) for token, logprob in pairs)
    return TokenLogprob(int(sampled.token_B[index]), float(sampled.logprob_B[index]), alternatives, version)
