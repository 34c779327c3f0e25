"""Drafts of speculative decoding: the interface of drafters, the token history on the device, and n-gram lookup.

B rows, K drafts, N slots or rows, S tokens of context, T tokens per row and step, D model width.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from maxhydra.config.schema.decode import Speculation as Config
from maxhydra.config.schema.decode import SpeculationMethod
from maxhydra.decode.sampler import SamplingArrays
from maxhydra.decode.slot_state import SlotState
from maxhydra.layers import PageTable

Tree = Any
# Marks tokens that the host has not read yet, and rows without a draft. Never equal to a sampled token.
UNKNOWN = -1


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How tokens are drafted, and the size of the history that they come from."""

    tokens: int
    """Maximum number of drafted tokens per step, K."""
    max_ngram: int
    min_ngram: int
    context: int
    """Tokens of the longest sequence, S."""
    method: SpeculationMethod = SpeculationMethod.ngram

    @classmethod
    def of(cls, config: Config, context: int) -> "Drafting | None":
        """None without speculative decoding."""
        if config.method is None:
            return None
        return cls(config.tokens, config.max_ngram, config.min_ngram, context, config.method)

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens that a step generates per row, T."""
        return self.tokens + 1


class TokenHistory(NamedTuple):
    """Tokens and progress on the device: of all slots, or of the rows of a call."""

    tokens_NS: jax.Array
    """int32 tokens up to position `last_N`; later entries are arbitrary."""
    last_N: jax.Array
    """Position of the last token, the next input of the model."""
    remaining_N: jax.Array
    """Tokens that may still be generated."""

    @classmethod
    def empty(cls, slots: int, length: int) -> Self:
        zeros_N = jnp.zeros(slots, jnp.int32)
        return cls(jnp.zeros((slots, length), jnp.int32), zeros_N, zeros_N)

    def take(self, slots_B: jax.Array, length: int) -> "TokenHistory":
        """The rows of some slots, cut to a context of `length` tokens."""
        return TokenHistory(self.tokens_NS[slots_B, :length], self.last_N[slots_B], self.remaining_N[slots_B])

    def put(self, rows: "TokenHistory", slots_B: jax.Array) -> "TokenHistory":
        """The history with the rows of some slots replaced."""
        length = rows.tokens_NS.shape[1]
        return TokenHistory(
            self.tokens_NS.at[slots_B, :length].set(rows.tokens_NS),
            self.last_N.at[slots_B].set(rows.last_N),
            self.remaining_N.at[slots_B].set(rows.remaining_N),
        )

    @property
    def length(self) -> int:
        return self.tokens_NS.shape[1]

    @property
    def last_token_N(self) -> jax.Array:
        return jnp.take_along_axis(self.tokens_NS, self.last_N[:, None], axis=1, mode="clip")[:, 0]

    def with_last_token(self, token_N: jax.Array) -> "TokenHistory":
        every_N = jnp.arange(token_N.shape[0])
        return self._replace(tokens_NS=self.tokens_NS.at[every_N, self.last_N].set(token_N, mode="drop"))

    def append(self, tokens_NT: jax.Array, is_used_NT: jax.Array) -> "TokenHistory":
        """The history with the used tokens, which are the first ones of each row, appended."""
        every_N1, T = jnp.arange(tokens_NT.shape[0])[:, None], tokens_NT.shape[1]
        positions_NT = jnp.where(is_used_NT, self.last_N[:, None] + 1 + jnp.arange(T), self.tokens_NS.shape[1])
        count_N = jnp.sum(is_used_NT, axis=1)
        tokens_NS = self.tokens_NS.at[every_N1, positions_NT].set(tokens_NT, mode="drop")
        return TokenHistory(tokens_NS, self.last_N + count_N, self.remaining_N - count_N)


class DraftCaches(NamedTuple):
    """KV caches that a step reads and updates."""

    model: Tree
    draft: Tree
    """Of the draft model; None without one."""


class DraftState(NamedTuple):
    """What speculative decoding has on the device between calls."""

    history: TokenHistory
    draft_cache: Tree
    """KV cache of the draft model; None without one."""


class DraftInputs(NamedTuple):
    """The rows of a step before its tokens are drafted."""

    history: TokenHistory
    rows: PageTable
    adapters_B: jax.Array | None
    sampling: SamplingArrays
    """Sampling parameters of the first drafted token."""
    slot_state: SlotState


class DraftWeights(NamedTuple):
    """Weights that a step reads."""

    model: Tree
    draft: Tree
    """Of the draft model; None without one."""


class Drafts(NamedTuple):
    """Drafted tokens."""

    tokens_BK: jax.Array
    is_drafted_B: jax.Array
    """Which rows have drafts."""


class Drafter(Protocol):
    """Drafts tokens inside a program."""

    def draft(self, weights: DraftWeights, caches: DraftCaches, inputs: DraftInputs) -> tuple[Drafts, DraftCaches]:
        """The drafts of every row, and the updated caches.

        The caches' entries of drafted tokens are approximate until the step that verifies the drafts overwrites them.
        """
        ...

    def keep(
        self, caches: DraftCaches, hidden_BTD: jax.Array, positions_BT: jax.Array, last_B: jax.Array, rows: PageTable
    ) -> DraftCaches:
        """The caches after verification. `last_B`: index of the last accepted input, with its hidden state."""
        ...


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Drafts from the history."""

    drafting: Drafting

    def draft(self, weights: DraftWeights, caches: DraftCaches, inputs: DraftInputs) -> tuple[Drafts, DraftCaches]:
        return draft_tokens(inputs.history, self.drafting), caches

    def keep(self, caches: DraftCaches, *_: Any) -> DraftCaches:
        return caches


def draft_tokens(history: TokenHistory, drafting: Drafting) -> Drafts:
    """Draft the tokens that followed the latest earlier occurrence of the longest possible n-gram, if there is one.

    Behind the last known token the draft repeats: an occurrence that is p tokens earlier continues with period p.
    """
    tokens_BS, last_B1 = history.tokens_NS, history.last_N[:, None]
    position_S = jnp.arange(tokens_BS.shape[1])
    is_equal_BS, length_BS = jnp.ones(tokens_BS.shape, bool), jnp.zeros(tokens_BS.shape, jnp.int32)
    for back in range(drafting.max_ngram):
        token_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(last_B1 - back, 0), axis=1)
        is_equal_BS &= (jnp.roll(tokens_BS, back, axis=1) == token_B1) & (position_S >= back) & (last_B1 >= back)
        length_BS += is_equal_BS
    is_occurrence_BS = (position_S < last_B1) & (length_BS >= drafting.min_ngram)
    score_BS = jnp.where(is_occurrence_BS, length_BS * tokens_BS.shape[1] + position_S, -1)
    found_B1 = jnp.argmax(score_BS, axis=1)[:, None]
    has_draft_B = jnp.max(score_BS, axis=1) >= 0
    offset_BK = jnp.arange(drafting.tokens) % jnp.maximum(last_B1 - found_B1, 1)
    draft_BK = jnp.take_along_axis(tokens_BS, found_B1 + 1 + offset_BK, axis=1, mode="clip")
    return Drafts(jnp.where(has_draft_B[:, None], draft_BK, UNKNOWN), has_draft_B)
