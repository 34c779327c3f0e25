"""The functions that the engine's programs compute: forward, sample, and multi-step decode.

Letters of dimensions as in steps.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.prompt_scores import score_prompts
from maxhydra.decode.sampler import SampledTokens, SamplingFeatures, greedy_tokens
from maxhydra.decode.slot_state import SlotState, sample_slots
from maxhydra.decode.step_inputs import HEAD, StepInputs, StepShape, advance
from maxhydra.decode.weight_layout import WeightLayout
from maxhydra.layers import AudioClips, Context, PageTable
from maxhydra.sharding import Sharder

Tree = Any


class SampleKey(NamedTuple):
    """Key of a sampling program."""

    rows: int
    features: SamplingFeatures
    logit_steps: int = 0
    """Steps of the multi-step call whose logits it samples from; 0: those of a forward call."""

    def covers(self, other: "SampleKey") -> bool:
        is_same = self.rows == other.rows and self.logit_steps == other.logit_steps
        return is_same and self.features.covers(other.features)

    @property
    def size(self) -> int:
        """Return roughly how often the logits are read."""
        features = self.features
        passes = 1 + 4 * features.random + 64 * features.filters + 8 * features.logprobs
        passes += features.penalties + features.bias + features.mask
        return self.rows * passes

    @property
    def num_steps(self) -> int:
        return 1


class MultiStepKey(NamedTuple):
    """Key of a multi-step decode program: several tokens per row, each fed back into the next step.

    With `features.mask` it samples without masks and also returns its logits; see mask_policy.py.
    """

    shape: StepShape
    features: SamplingFeatures
    num_steps: int

    def covers(self, other: "MultiStepKey") -> bool:
        fits = self.num_steps >= other.num_steps and self.shape.covers(other.shape)
        return fits and self.features.covers(other.features)

    @property
    def size(self) -> int:
        # A batch without grammars gets a program that keeps no logits.
        return self.shape.size * self.num_steps * (2 if self.features.mask else 1)


class Forwarded(NamedTuple):
    """Results of a forward call."""

    logits_BV: jax.Array
    """Of each row's last token."""
    cache: Tree
    head_BC: jax.Array
    """The inputs of sampling."""
    experts_BTLK: jax.Array | None
    scores: SampledTokens | None
    """Log-probabilities [B, T] of the tokens after each of the inputs, if requested."""
    next_BC: jax.Array | None = None
    """The inputs of the next call, unless this is a prefill."""


def make_forward(
    layout: WeightLayout, sharder: Sharder, shape: StepShape, *, records_experts: bool
) -> Callable[..., Forwarded]:
    hidden = make_hidden(layout, sharder, shape, records_experts=records_experts)

    def forward(
        weights: StepWeights,
        cache: Tree,
        last_token_N: jax.Array,
        inputs_BC: jax.Array,
        images: jax.Array | None = None,
        audio: AudioClips | None = None,
    ) -> Forwarded:
        params, inputs = weights.used(layout), StepInputs.unpack(inputs_BC, pages=shape.pages)
        adapters_B = weights.adapters_of(inputs.rows.slots_B)
        tokens_BT = inputs.tokens_BT[:, : shape.tokens] if shape.is_prefill else last_token_N[inputs.rows.slots_B, None]
        positions_BT = inputs.positions(shape.tokens)
        row_inputs = inputs.rows, inputs.lag_B, adapters_B
        hidden_BTD, cache, experts = hidden(params, cache, tokens_BT, positions_BT, *row_inputs, images, audio)
        scores = None
        if shape.is_scored:
            scores = score_prompts(layout.model, params, hidden_BTD, inputs.tokens_BT[:, 1:], sharder)
            last_B11 = jnp.maximum(jnp.sum(positions_BT >= 0, axis=1) - 1, 0)[:, None, None]
            hidden_BTD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)
        logits_BV = layout.model.logits(params, hidden_BTD, sharder)[:, 0]
        head_BC = advance(inputs_BC[:, :HEAD], shape.tokens)
        next_BC = None if shape.is_prefill else advance(inputs_BC, shape.tokens)
        return Forwarded(logits_BV, cache, head_BC, experts, scores, next_BC)

    return forward


def make_hidden(
    layout: WeightLayout, sharder: Sharder, shape: StepShape, *, records_experts: bool
) -> Callable[..., tuple[jax.Array, Tree, jax.Array | None]]:
    """Return a function for the hidden states [B, 1, D] of each row's last token, the updated cache and the experts.

    The hidden states of all tokens, [B, T, D], if prompts are scored.
    """
    is_last_only = shape.is_prefill and not shape.is_scored

    def hidden(
        params: Tree,
        cache: Tree,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        rows: PageTable,
        lag_B: jax.Array,
        adapters_B: jax.Array | None,
        images: jax.Array | None = None,
        audio: AudioClips | None = None,
    ) -> tuple[jax.Array, Tree, jax.Array | None]:
        is_token_BT = positions_BT >= 0
        # The positions of a prompt with images are those of its tokens and images.
        is_behind = layout.model.config.has_axis_positions and not shape.is_prefill
        context = Context(
            positions=positions_BT,
            segments=is_token_BT.astype(jnp.int32),
            sharder=sharder,
            cache=cache,
            dropout_key=None,
            rows=rows,
            adapters_B=adapters_B,
            images=images,
            axis_positions=(positions_BT - lag_B[:, None])[:, :, None] if is_behind else None,
            audio=audio,
            output_index=jnp.maximum(jnp.sum(is_token_BT, axis=1) - 1, 0) if is_last_only else None,
            is_fresh=shape.is_fresh,
            records_experts=records_experts,
        )
        output = layout.model.forward(params, tokens_BT, context)
        experts = layout.model.expert_ids(output, context) if records_experts else None
        return output.hidden_BTD, output.cache, experts

    return hidden


def make_sample(features: SamplingFeatures) -> Callable[..., tuple[SlotState, SampledTokens]]:
    """Return a function that samples from logits [B, V], or [steps, B, V] with inputs of `resample_inputs`."""

    def sample_rows(
        slot_state: SlotState, logits: jax.Array, head_BC: jax.Array, mask_BW: jax.Array | None = None
    ) -> tuple[SlotState, SampledTokens]:
        inputs = StepInputs.unpack(head_BC, pages=0)
        target_B, logits_BV = inputs.target_B, logits
        if logits.ndim == 3:
            logits_BV = jnp.take_along_axis(logits, inputs.remaining_B[None, :, None], axis=0)[0]
        usage_NV, sampled = sample_slots(features, slot_state, logits_BV, target_B, inputs.sampling, mask_BW)
        last_token_N = slot_state.last_token_N.at[target_B].set(jnp.maximum(sampled.token_B, 0))
        return slot_state._replace(last_token_N=last_token_N, usage_NV=usage_NV), sampled

    return sample_rows


class Decoded(NamedTuple):
    """Results of a multi-step call of S steps."""

    cache: Tree
    slot_state: SlotState
    next_BC: jax.Array
    """The inputs of the next call."""
    sampled: SampledTokens
    """[S, B]; entries beyond a row's remaining tokens are undefined."""
    experts_BSLK: jax.Array | None
    logits_SBV: jax.Array | None
    """Of a program with `features.mask`."""


def make_multi_step(
    layout: WeightLayout, sharder: Sharder, key: MultiStepKey, hidden: Callable[..., Any], *, padding_slot: int
) -> Callable[..., Decoded]:
    """Return a scan over decode steps: tokens are fed back in the carry, and stored in the slot state at the end."""
    model, has_logits, features = layout.model, key.features.mask, key.features._replace(mask=False)

    def decode(stored: StepWeights, cache: Tree, slot_state: SlotState, inputs_BC: jax.Array) -> Decoded:
        inputs = StepInputs.unpack(inputs_BC, pages=key.shape.pages)
        table_BW, slots_B = inputs.rows
        adapters_B = stored.adapters_of(slots_B)

        def step(carry: tuple[Tree, jax.Array, jax.Array], number: jax.Array) -> tuple[Any, Any]:
            """Decode one token per row; a row without remaining tokens neither reads nor writes the cache."""
            (cache, usage_NV, last_B), weights = carry, stored.used(layout)
            is_active_B = number < inputs.remaining_B
            position_B1 = jnp.where(is_active_B, inputs.start_B + number, -1)[:, None]
            active_B = jnp.where(is_active_B, slots_B, padding_slot)
            table = PageTable(table_BW, active_B)
            row_inputs = table, inputs.lag_B, adapters_B
            hidden_B1D, cache, experts = hidden(weights, cache, last_B[:, None], position_B1, *row_inputs)
            if features.is_greedy and not has_logits:
                logit_B, token_B = model.largest_logit(weights, hidden_B1D[:, 0], sharder)
                return (cache, usage_NV, token_B), (greedy_tokens(logit_B, token_B), experts, None)
            logits_BV = model.logits(weights, hidden_B1D, sharder)[:, 0]
            sampling = inputs.sampling._replace(position_B=inputs.start_B + number + 1)
            state = slot_state._replace(usage_NV=usage_NV)
            usage_NV, sampled = sample_slots(features, state, logits_BV, active_B, sampling)
            results = sampled, experts, logits_BV if has_logits else None
            return (cache, usage_NV, jnp.maximum(sampled.token_B, 0)), results

        initial = cache, slot_state.usage_NV, slot_state.last_token_N[slots_B]
        (cache, usage_NV, _), (sampled, experts, logits) = jax.lax.scan(step, initial, jnp.arange(key.num_steps))
        experts = None if experts is None else jnp.moveaxis(experts[:, :, 0], 0, 1)
        active_B = jnp.where(inputs.remaining_B > 0, slots_B, padding_slot)
        last_step_B = jnp.clip(inputs.remaining_B, 1, key.num_steps) - 1
        last_B = sampled.token_B[last_step_B, jnp.arange(active_B.shape[0])]
        last_token_N = slot_state.last_token_N.at[active_B].set(jnp.maximum(last_B, 0))
        slot_state = slot_state._replace(last_token_N=last_token_N, usage_NV=usage_NV)
        return Decoded(cache, slot_state, advance(inputs_BC, key.num_steps), sampled, experts, logits)

    return decode
