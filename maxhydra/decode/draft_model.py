"""Drafts of speculative decoding by a smaller model with the same tokenizer (Leviathan et al., 2023).

The draft model has its own KV cache, in pages with the numbers of the model's. A step runs it once per draft, first on
the last two tokens: if all drafts of the step before were accepted, the last of them was never its input. Drafts are
sampled like the tokens that verify them, with the same seeds and positions, so that equal distributions give equal
tokens also with a temperature.

Prompts and tokens of plain steps are added to that cache by separate calls (`make_fill`).

B rows, K drafts, T tokens per row, V vocabulary, D width of the draft model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.cache_arrays import CacheArrays
from maxhydra.decode.drafting import DraftCaches, Drafting, DraftInputs, Drafts, DraftState, DraftWeights
from maxhydra.decode.sampler import SamplingFeatures
from maxhydra.decode.slot_state import sample_slots
from maxhydra.decode.step_functions import make_hidden
from maxhydra.decode.step_inputs import StepInputs, StepShape
from maxhydra.decode.weight_layout import WeightLayout, choose_weight_layout
from maxhydra.layers import PagedCacheSpec, PageTable
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

Tree = Any


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A draft model and its weights in the standard layout, on the mesh of the engine."""

    model: ModelDef
    params: Tree


@dataclasses.dataclass(frozen=True)
class DraftLayout:
    """How an engine stores the weights and the KV cache of its draft model."""

    weights: WeightLayout
    cache: CacheArrays


def place_draft_model(
    draft: DraftModel | None, cache_spec: PagedCacheSpec, sharder: Sharder
) -> tuple[DraftLayout | None, Tree]:
    """The layout of a draft model and its weights in it; None and None without one."""
    if draft is None:
        return None, None
    weights = choose_weight_layout(draft.model, sharder, jax.default_backend())
    layout = DraftLayout(weights, CacheArrays(weights.model.empty_cache, cache_spec, sharder))
    return layout, weights.keep(draft.params)


class ModelDrafter:
    """Drafts `drafting.tokens` tokens per row, inside a program of this shape."""

    def __init__(
        self,
        layout: WeightLayout,
        sharder: Sharder,
        shape: StepShape,
        *,
        drafting: Drafting,
        features: SamplingFeatures,
    ):
        """`layout`: of the draft model. Drafts ignore penalties, which depend on the drafts before."""
        self._layout, self._sharder, self._num_drafts = layout, sharder, drafting.tokens
        self._features = features._replace(penalties=False, logprobs=False, alternatives=False)
        self._run = _make_run(layout, sharder, shape)

    def draft(self, weights: DraftWeights, caches: DraftCaches, inputs: DraftInputs) -> tuple[Drafts, DraftCaches]:
        history, params = inputs.history, self._layout.use(weights.draft)
        last_B, most_B = history.last_N, history.remaining_N - 1

        def draft_next(
            carry: tuple[Tree, jax.Array], number: jax.Array, previous_B: jax.Array | None = None
        ) -> tuple[tuple[Tree, jax.Array], jax.Array]:
            """Draft a token after the one in the carry."""
            cache, token_B = carry
            is_needed_B1, position_B1 = (number < most_B)[:, None], (last_B + number)[:, None]
            tokens_BT = token_B[:, None]
            if previous_B is not None:
                tokens_BT = jnp.stack([previous_B, token_B], axis=1)
                position_B1 = position_B1 + jnp.arange(-1, 1)
            positions_BT = jnp.where(is_needed_B1, position_B1, -1)
            hidden_BTD, cache = self._run(params, cache, tokens_BT, positions_BT, inputs.rows)
            token_B = self._sample(params, hidden_BTD[:, -1:], inputs, number)
            return (cache, token_B), token_B

        previous_B1 = jnp.take_along_axis(history.tokens_NS, jnp.maximum(last_B - 1, 0)[:, None], axis=1)
        initial = caches.draft, history.last_token_N
        carry, first_B = draft_next(initial, jnp.int32(0), previous_B1[:, 0])
        (cache, _), draft_KB = jax.lax.scan(draft_next, carry, jnp.arange(1, self._num_drafts))
        draft_BK = jnp.concatenate([first_B[None], draft_KB]).T
        return Drafts(draft_BK, most_B > 0), caches._replace(draft=cache)

    def keep(self, caches: DraftCaches, *_: Any) -> DraftCaches:
        return caches

    def _sample(self, params: Tree, hidden_B1D: jax.Array, inputs: DraftInputs, number: jax.Array) -> jax.Array:
        model, sampling = self._layout.model, inputs.sampling
        if self._features.is_greedy:
            return model.largest_logit(params, hidden_B1D[:, 0], self._sharder)[1]
        logits_BV = model.logits(params, hidden_B1D, self._sharder)[:, 0]
        # Vocabularies of one tokenizer may be padded to different sizes.
        num_tokens, own = inputs.slot_state.usage_NV.shape[1], logits_BV.shape[1]
        missing = ((0, 0), (0, max(num_tokens - own, 0)))
        logits_BV = jnp.pad(logits_BV, missing, constant_values=jnp.finfo(logits_BV.dtype).min)[:, :num_tokens]
        sampling = sampling._replace(position_B=sampling.position_B + number)
        _, sampled = sample_slots(self._features, inputs.slot_state, logits_BV, inputs.rows.slots_B, sampling)
        return jnp.maximum(sampled.token_B, 0)


def make_fill(layout: WeightLayout, sharder: Sharder, shape: StepShape) -> Callable[..., DraftState]:
    """Return a function that adds tokens of the histories to the draft model's cache."""
    run = _make_run(layout, sharder, dataclasses.replace(shape, is_prefill=False))

    def fill(stored: StepWeights, state: DraftState, inputs_BC: jax.Array) -> DraftState:
        history, cache = state
        inputs = StepInputs.unpack(inputs_BC, pages=shape.pages)
        slots_B, positions_BT = inputs.rows.slots_B, inputs.positions(shape.tokens)
        # The last two tokens are inputs of the next step; the host may not know yet which ones they are.
        positions_BT = jnp.where(positions_BT < history.last_N[slots_B, None] - 1, positions_BT, -1)
        tokens_BT = jnp.take_along_axis(history.tokens_NS[slots_B], jnp.maximum(positions_BT, 0), axis=1)
        _, cache = run(layout.use(stored.draft), cache, tokens_BT, positions_BT, inputs.rows)
        return DraftState(history, cache)

    return fill


def _make_run(
    layout: WeightLayout, sharder: Sharder, shape: StepShape
) -> Callable[[Tree, Tree, jax.Array, jax.Array, PageTable], tuple[jax.Array, Tree]]:
    """Return a function for the draft model's hidden states [B, T, D] of text, and the updated cache."""
    hidden = make_hidden(layout, sharder, shape, records_experts=False)

    def run(
        params: Tree, cache: Tree, tokens_BT: jax.Array, positions_BT: jax.Array, rows: PageTable
    ) -> tuple[jax.Array, Tree]:
        # The model's vocabulary may be larger, and tokens that the host has not read are unknown.
        tokens_BT = jnp.clip(tokens_BT, 0, layout.model.config.vocab_size - 1)
        hidden_BTD, cache, _ = hidden(params, cache, tokens_BT, positions_BT, rows, jnp.zeros_like(rows.slots_B), None)
        return hidden_BTD, cache

    return run
