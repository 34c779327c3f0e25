"""Speculative decoding: several drafted tokens per row are verified in one forward pass.

A token is a function of the logits, seed and position of its row, also with a temperature (sampler.py). The model runs
on the last token and the drafted ones, every position is sampled, and drafts are accepted up to the first that differs
from the sampled token, which is the next token itself. The tokens are those of plain decoding, up to rounding between
programs of different shapes. Keys and values of rejected drafts are overwritten by the next step, before any query
sees them.

Drafts come from the tokens of the sequence itself (drafting.py), from a layer of the model (mtp_drafting.py) or from a
smaller model (draft_model.py). Tokens and progress of each slot are on the device, so that a call has several steps,
and the next call is dispatched before the host knows how many tokens this one generates. Calls without drafts (see
draft_policy.py) read and extend the same history, so that the host may choose either kind for each call.

B rows, T tokens per row (the last one and K drafts), N slots, S tokens of context, V vocabulary, P = B * T.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.drafting import (
    UNKNOWN,
    DraftCaches,
    Drafter,
    DraftInputs,
    Drafts,
    DraftState,
    DraftWeights,
    TokenHistory,
)
from maxhydra.decode.sampler import SampledTokens, SamplingArrays, SamplingFeatures, greedy_tokens
from maxhydra.decode.slot_state import SlotState, sample_slots
from maxhydra.decode.step_functions import Decoded, MultiStepKey
from maxhydra.decode.step_inputs import REMAINING, SLOT, START, StepInputs
from maxhydra.decode.weight_layout import WeightLayout
from maxhydra.layers import PageTable
from maxhydra.sharding import Sharder

Tree = Any


class Verified(NamedTuple):
    """Results of a call of several steps."""

    sampled: SampledTokens
    """Of all positions of all steps, [steps * T, B]."""
    is_used: jax.Array
    """[steps * T, B] whether all drafts before the position were accepted, and the row was not complete."""
    drafted_B: jax.Array | None
    """Number of drafted tokens of each row; None of a call without drafts."""
    accepted_B: jax.Array | None
    """How many of them were accepted."""
    experts: jax.Array | None
    """[B, steps * T, L, K] experts of the inputs."""


class StepTokens(NamedTuple):
    """The last token of each row and its drafts, the inputs of one step."""

    tokens_BT: jax.Array
    positions_BT: jax.Array
    """-1 for tokens without a draft, and beyond those that may still be generated."""
    slots_B: jax.Array
    """The padding slot for rows that are complete."""

    @classmethod
    def of(cls, history: TokenHistory, slots_B: jax.Array, drafts: Drafts, *, padding_slot: int) -> "StepTokens":
        draft_BK, has_draft_B = drafts
        T = draft_BK.shape[1] + 1
        count_B = jnp.minimum(jnp.where(has_draft_B, T, 1), history.remaining_N)
        positions_BT = history.last_N[:, None] + jnp.arange(T)
        return cls(
            jnp.concatenate([history.last_token_N[:, None], draft_BK], axis=1),
            jnp.where(jnp.arange(T) < count_B[:, None], positions_BT, -1),
            jnp.where(count_B > 0, slots_B, padding_slot),
        )

    @property
    def is_input_BT(self) -> jax.Array:
        return self.positions_BT >= 0

    def find_used(self, sampled_BT: jax.Array) -> jax.Array:
        """[B, T] whether a sampled token is used: its position is an input, and so are the tokens before it."""
        is_accepted_BK = (self.tokens_BT[:, 1:] == sampled_BT[:, :-1]).astype(jnp.int32)
        is_reached_BK = jnp.cumprod(is_accepted_BK, axis=1) > 0
        return self.is_input_BT & jnp.pad(is_reached_BK, ((0, 0), (1, 0)), constant_values=True)


def make_verify_steps(
    layout: WeightLayout,
    sharder: Sharder,
    key: MultiStepKey,
    hidden: Callable[..., Any],
    *,
    drafter: Drafter,
    page_size: int,
) -> Callable[..., tuple[Tree, SlotState, DraftState, jax.Array, Verified]]:
    """Return a scan over steps that draft and verify tokens.

    The inputs' columns for the position and the remaining tokens are not used: the history has both.
    """
    model = layout.model

    def decode(
        stored: StepWeights, cache: Tree, slot_state: SlotState, draft_state: DraftState, inputs_BC: jax.Array
    ) -> tuple[Tree, SlotState, DraftState, jax.Array, Verified]:
        history = draft_state.history
        inputs = StepInputs.unpack(inputs_BC, pages=key.shape.pages)
        table_BW, slots_B = inputs.rows
        adapters_B, padding_slot = stored.adapters_of(slots_B), history.last_N.shape[0] - 1

        def step(carry: tuple[DraftCaches, jax.Array, TokenHistory], _: None) -> tuple[Any, Any]:
            (caches, usage_NV, rows), weights = carry, stored.used(layout)
            sampling = inputs.sampling._replace(position_B=rows.last_N + 1)
            state = slot_state._replace(usage_NV=usage_NV)
            draft_inputs = DraftInputs(rows, PageTable(table_BW, slots_B), adapters_B, sampling, state)
            drafts, caches = drafter.draft(DraftWeights(weights, stored.draft), caches, draft_inputs)
            step_tokens = StepTokens.of(rows, slots_B, drafts, padding_slot=padding_slot)
            row_inputs = PageTable(table_BW, step_tokens.slots_B), inputs.lag_B, adapters_B
            tokens_BT = jnp.maximum(step_tokens.tokens_BT, 0)
            positions_BT = step_tokens.positions_BT
            hidden_BTD, cache, experts = hidden(weights, caches.model, tokens_BT, positions_BT, *row_inputs)
            caches = caches._replace(model=cache)
            if key.features.is_greedy:
                largest = model.largest_logit(weights, hidden_BTD.reshape(-1, hidden_BTD.shape[2]), sharder)
                sampled = _split_rows(greedy_tokens(*largest), tokens_BT.shape)
            else:
                logits_BTV = model.logits(weights, hidden_BTD, sharder)
                sample = _sample_in_order if key.features.penalties else _sample_flat
                usage_NV, sampled = sample(key.features, state, logits_BTV, step_tokens, sampling)
            is_used_BT = step_tokens.find_used(sampled.token_B.T)
            last_B = jnp.maximum(jnp.sum(is_used_BT, axis=1) - 1, 0)
            caches = drafter.keep(caches, hidden_BTD, positions_BT, last_B, row_inputs[0])
            rows = rows.append(jnp.maximum(sampled.token_B.T, 0), is_used_BT)
            drafted_B, accepted_B = (jnp.sum(each[:, 1:], axis=1) for each in (step_tokens.is_input_BT, is_used_BT))
            return (caches, usage_NV, rows), Verified(sampled, is_used_BT.T, drafted_B, accepted_B, experts)

        rows = history.take(slots_B, key.shape.pages * page_size).with_last_token(slot_state.last_token_N[slots_B])
        initial = DraftCaches(cache, draft_state.draft_cache), slot_state.usage_NV, rows
        (caches, usage_NV, rows), verified = jax.lax.scan(step, initial, None, length=key.num_steps)
        last_token_N = slot_state.last_token_N.at[slots_B].set(rows.last_token_N)
        slot_state = slot_state._replace(last_token_N=last_token_N, usage_NV=usage_NV)
        draft_state = DraftState(history.put(rows, slots_B), caches.draft)
        return caches.model, slot_state, draft_state, inputs_BC, _join_steps(verified)

    return decode


def make_plain_steps(
    decode: Callable[..., Decoded], key: MultiStepKey
) -> Callable[..., tuple[Tree, SlotState, DraftState, jax.Array, Verified]]:
    """Return the multi-step function `decode` with positions from the history, to which it appends its tokens.

    Same arguments and results as the scan over steps that verify drafts.
    """

    def decode_from_history(
        stored: StepWeights, cache: Tree, slot_state: SlotState, draft_state: DraftState, inputs_BC: jax.Array
    ) -> tuple[Tree, SlotState, DraftState, jax.Array, Verified]:
        history, draft_cache = draft_state
        slots_B = inputs_BC[:, SLOT].astype(jnp.int32)
        last_B, remaining_B = history.last_N[slots_B], history.remaining_N[slots_B]
        last_token_B1 = slot_state.last_token_N[slots_B][:, None]
        current_BC = inputs_BC.at[:, START].set(last_B.astype(inputs_BC.dtype))
        current_BC = current_BC.at[:, REMAINING].set(remaining_B.astype(inputs_BC.dtype))
        cache, slot_state, _, sampled, experts, _ = decode(stored, cache, slot_state, current_BC)
        is_used_SB = jnp.arange(key.num_steps)[:, None] < remaining_B
        # The last token before the call may have been sampled by the prefill.
        tokens_BS = jnp.concatenate([last_token_B1, jnp.maximum(sampled.token_B.T, 0)], axis=1)
        is_token_BS = jnp.pad(is_used_SB.T, ((0, 0), (1, 0)), constant_values=True)
        positions_BS = jnp.where(is_token_BS, last_B[:, None] + jnp.arange(key.num_steps + 1), history.length)
        count_B = jnp.minimum(remaining_B, key.num_steps)
        history = TokenHistory(
            history.tokens_NS.at[slots_B[:, None], positions_BS].set(tokens_BS, mode="drop"),
            history.last_N.at[slots_B].add(count_B),
            history.remaining_N.at[slots_B].add(-count_B),
        )
        draft_state = DraftState(history, draft_cache)
        return cache, slot_state, draft_state, inputs_BC, Verified(sampled, is_used_SB, None, None, experts)

    return decode_from_history


def _sample_flat(
    features: SamplingFeatures,
    state: SlotState,
    logits_BTV: jax.Array,
    inputs: StepTokens,
    sampling: SamplingArrays,
) -> tuple[jax.Array, SampledTokens]:
    """Sample a token [T, B] at every position, each as a row. `sampling`: of the first position."""
    B, T, V = logits_BTV.shape
    position_P = (sampling.position_B[:, None] + jnp.arange(T)).reshape(-1)
    slots_P, sampling_P = jax.tree.map(lambda x: jnp.repeat(x, T, axis=0), (inputs.slots_B, sampling))
    sampling_P = sampling_P._replace(position_B=position_P)
    usage_NV, sampled = sample_slots(features, state, logits_BTV.reshape(-1, V), slots_P, sampling_P)
    return usage_NV, _split_rows(sampled, (B, T))


def _sample_in_order(
    features: SamplingFeatures,
    state: SlotState,
    logits_BTV: jax.Array,
    inputs: StepTokens,
    sampling: SamplingArrays,
) -> tuple[jax.Array, SampledTokens]:
    """Sample a token [T, B] at one position after the other, since penalties depend on the tokens before.

    Also returns the usage, which includes the used tokens only.
    """
    padding_slot = state.usage_NV.shape[0] - 1
    # No token follows the last position.
    next_BT = jnp.pad(inputs.tokens_BT[:, 1:], ((0, 0), (0, 1)), constant_values=UNKNOWN)

    def sample_position(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, ...]) -> tuple[Any, SampledTokens]:
        (usage_NV, is_reached_B), (number, logits_BV, next_B, is_input_B) = carry, at
        is_used_B = is_reached_B & is_input_B
        slots_B = jnp.where(is_used_B, inputs.slots_B, padding_slot)
        here = sampling._replace(position_B=sampling.position_B + number)
        usage_NV, sampled = sample_slots(features, state._replace(usage_NV=usage_NV), logits_BV, slots_B, here)
        return (usage_NV, is_used_B & (sampled.token_B == next_B)), sampled

    initial = state.usage_NV, jnp.ones(logits_BTV.shape[0], bool)
    positions = jnp.arange(logits_BTV.shape[1]), logits_BTV.swapaxes(0, 1), next_BT.T, inputs.is_input_BT.T
    (usage_NV, _), sampled = jax.lax.scan(sample_position, initial, positions)
    return usage_NV, sampled


def _split_rows(sampled: SampledTokens, shape: tuple[int, ...]) -> SampledTokens:
    """[T, B, ...] tokens of rows [B * T, ...]; `shape`: B and T."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]).swapaxes(0, 1), sampled)


def _join_steps(verified: Verified) -> Verified:
    """Results stacked over the steps as those of the call."""

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    sampled, is_used = jax.tree.map(join, (verified.sampled, verified.is_used))
    drafted_B, accepted_B = jax.tree.map(partial(jnp.sum, axis=0), (verified.drafted_B, verified.accepted_B))
    experts = verified.experts
    if experts is not None:
        # [steps, B, T, L, K] as [B, steps * T, L, K].
        experts = jnp.moveaxis(join(jnp.moveaxis(experts, 2, 1)), 1, 0)
    return Verified(sampled, is_used, drafted_B, accepted_B, experts)
