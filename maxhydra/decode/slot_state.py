"""Device state of the batch slots: the last token, and what penalties and logit biases of a sequence need.

B rows, N slots (the last one is the padding slot), V vocabulary, K biased tokens.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.request import MAX_BIAS, Request
from maxhydra.decode.sampler import LogitControls, SampledTokens, SamplingArrays, SamplingFeatures, sample

# What an occurrence in the prompt, and one in the completion, contribute to the usage of a token.
PROMPT, COMPLETION = 1, 2
# From here on, occurrences are not counted, so that uint16 does not overflow.
MAX_USAGE = 2**16 - 1 - COMPLETION


class SlotState(NamedTuple):
    """Usage and bias are only maintained for sequences whose requests need them."""

    last_token_N: jax.Array
    """The token sampled last."""
    usage_NV: jax.Array
    """uint16: PROMPT for tokens of the prompt, plus COMPLETION for each occurrence in the completion."""
    bias_ids_NK: jax.Array
    bias_NK: jax.Array

    @classmethod
    def empty(cls, slots: int, vocab_size: int) -> Self:
        usage_NV, ids_NK = jnp.zeros((slots, vocab_size), jnp.uint16), jnp.zeros((slots, MAX_BIAS), jnp.int32)
        return cls(jnp.zeros(slots, jnp.int32), usage_NV, ids_NK, jnp.zeros((slots, MAX_BIAS), jnp.float32))


def sample_slots(
    features: SamplingFeatures,
    state: SlotState,
    logits_BV: jax.Array,
    slots_B: jax.Array,
    sampling: SamplingArrays,
    mask_BW: jax.Array | None = None,
) -> tuple[jax.Array, SampledTokens]:
    """Sample a token for every row; also return the usage, with that token if any row has a penalty."""
    usage_BV = state.usage_NV[slots_B] if features.penalties else None
    bias_BK = None
    if features.bias:
        # A slot may hold the bias of an earlier sequence.
        is_own_BK = jnp.arange(MAX_BIAS) < sampling.num_bias_B[:, None]
        bias_BK = jnp.where(is_own_BK, state.bias_ids_NK[slots_B], logits_BV.shape[1]), state.bias_NK[slots_B]
    sampled = sample(logits_BV, LogitControls(usage_BV, bias_BK, mask_BW), sampling, features)
    if usage_BV is None:
        return state.usage_NV, sampled
    token_B = jnp.maximum(sampled.token_B, 0)
    usage_B = jnp.take_along_axis(usage_BV, token_B[:, None], axis=1)[:, 0]
    usage_B = jnp.minimum(usage_B, MAX_USAGE) + jnp.uint16(COMPLETION)
    return state.usage_NV.at[slots_B, token_B].set(usage_B), sampled


def set_controls(state: SlotState, slot: int, request: Request) -> SlotState:
    """Set the usage of a slot to the prompt of a new sequence, and its bias to that of the request."""
    usage_V = np.zeros(state.usage_NV.shape[1], np.uint16)
    usage_V[list(request.prompt)] = PROMPT
    ids_K, bias_K = np.zeros(MAX_BIAS, np.int32), np.zeros(MAX_BIAS, np.float32)
    for number, (token, value) in enumerate(request.logit_bias):
        ids_K[number], bias_K[number] = token, value
    usage_NV, ids_NK, bias_NK = _set_rows(state[1:], np.int32(slot), (usage_V, ids_K, bias_K))
    return SlotState(state.last_token_N, usage_NV, ids_NK, bias_NK)


@jax.jit
def _set_rows(arrays: tuple[jax.Array, ...], slot: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(array.at[slot].set(row) for array, row in zip(arrays, rows, strict=True))
