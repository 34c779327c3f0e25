"""The jitted steps of the engine: forward (prefill or decode), sample, and multi-step decode; compiled per bucket.

Forward and sample are separate programs, so their variants add up instead of multiplying. KV cache and slot state are
donated and stay on the device, where sampled tokens are fed back.

A row's arithmetic does not depend on other rows, but programs of different shapes may sum in a different order: the
logits of a sequence in different batches differ by rounding (about 1e-6 relative in float32), and its tokens only if
two candidates are closer than that.

B rows, T tokens per row, C input columns, N slots (the last one is the padding slot), V vocabulary, D model width, W
pages per row.
"""

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.compile_cache import CompileCache, Program
from maxhydra.decode.prompt_scores import score_prompts
from maxhydra.decode.sampler import SampledTokens, SamplingFeatures, greedy_tokens
from maxhydra.decode.slot_state import SlotState, sample_slots
from maxhydra.decode.step_inputs import HEAD, StepInputs, StepShape, advance, num_columns
from maxhydra.decode.weight_layout import WeightLayout
from maxhydra.layers import Context, PagedCacheSpec, PageTable
from maxhydra.sharding import Sharder

Tree = Any
# Tokens from which on GPU kernels take longer than their launch. Command buffers (CUDA graphs), which need about a
# millisecond before the first kernel, do not pay from there on.
COMMAND_BUFFER_LIMIT = 1024


# Sampling features that a warm-up compiles for every bucket, and for the largest batch only.
GREEDY = SamplingFeatures(random=False, filters=False, penalties=False, logprobs=False, alternatives=False)
COMMON_FEATURES = (GREEDY, dataclasses.replace(GREEDY, random=True))
RARE_FEATURES = (
    dataclasses.replace(GREEDY, random=True, filters=True),
    SamplingFeatures(random=True, filters=True, penalties=True, logprobs=True, bias=True),
)
# Masks come from the host for every token, so that only single steps have them.
MASKED_FEATURES = dataclasses.replace(RARE_FEATURES[-1], mask=True)
ALL_TOKENS = 2**32 - 1


class SampleKey(NamedTuple):
    """Key of a sampling program."""

    rows: int
    features: SamplingFeatures

    def covers(self, other: "SampleKey") -> bool:
        return self.rows == other.rows and self.features.covers(other.features)

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
    """Key of a multi-step decode program: several tokens per row, each fed back into the next step."""

    shape: StepShape
    features: SamplingFeatures
    num_steps: int

    def covers(self, other: "MultiStepKey") -> bool:
        fits = self.num_steps >= other.num_steps and self.shape.covers(other.shape)
        return fits and self.features.covers(other.features)

    @property
    def size(self) -> int:
        return self.shape.size * self.num_steps


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


def map_caches(function: Callable[..., Any], *caches: Tree) -> Tree:
    """Apply a function to the caches of all blocks."""
    return jax.tree.map(function, *caches, is_leaf=lambda node: not isinstance(node, (dict, list)))


class CompiledSteps:
    """Compiles and calls the steps in every shape that comes up."""

    def __init__(
        self,
        layout: WeightLayout,
        weights: StepWeights,
        cache_spec: PagedCacheSpec,
        *,
        sharder: Sharder,
        deterministic: bool,
        records_experts: bool = False,
    ):
        """`weights`: used for their shapes and shardings only.

        `deterministic`: never substitute a larger program for the exact one, and wait for its compilation.
        `records_experts`: return the experts of all tokens, [B, T, L, K].
        """
        self._records_experts = records_experts
        model = layout.model
        self._layout, self._model, self._cache_spec, self._sharder = layout, model, cache_spec, sharder
        self._deterministic = deterministic
        self._abstract_weights = jax.tree.map(lambda leaf: _abstract(leaf, leaf.sharding), weights)
        self.replicated = sharder.sharding(())
        self._logits_sharding = sharder.sharding(("act_batch", "act_vocab"))
        caches = jax.eval_shape(lambda: model.empty_cache(cache_spec))
        self.cache_axes = map_caches(lambda cache: cache.axes(), caches)
        self.cache_shardings = sharder.tree(self.cache_axes)
        self._abstract_caches = jax.tree.map(_abstract, caches, self.cache_shardings)
        self._forwards: CompileCache[StepShape] = CompileCache(self._compile_forward, deterministic=deterministic)
        self._samplers: CompileCache[SampleKey] = CompileCache(self._compile_sample, deterministic=deterministic)
        self._multi_steps: CompileCache[MultiStepKey] = CompileCache(
            self._compile_multi_step, deterministic=deterministic
        )

    @property
    def padding_slot(self) -> int:
        """The slot of padding rows."""
        return self._cache_spec.slots

    def init_state(self) -> tuple[Tree, SlotState]:
        """Allocate an empty KV cache and slot state on the device."""
        cache = jax.jit(lambda: self._model.empty_cache(self._cache_spec), out_shardings=self.cache_shardings)()
        zeros = [jax.device_put(np.zeros(leaf.shape, leaf.dtype), self.replicated) for leaf in self._abstract_slots()]
        return cache, SlotState(*zeros)

    def warm_up(self, shapes: Iterable[StepShape], num_steps: int) -> list[Future[Program]]:
        """Start compiling the programs of these buckets, for bursts of `num_steps`; return one future per program.

        Rarely used sampling features have programs for the largest batch only, which smaller ones use too.
        """
        shapes = list(shapes)
        decode_shapes, prefill_shapes = [s for s in shapes if not s.is_prefill], [s for s in shapes if s.is_prefill]
        largest = sorted(decode_shapes, key=lambda shape: shape.size)[-1:]
        decoded = [(shape, features) for shape in decode_shapes for features in COMMON_FEATURES]
        decoded += [(shape, features) for shape in largest for features in RARE_FEATURES]
        sample_rows = {shape.rows for shape in prefill_shapes}
        if num_steps == 1:
            prefill_shapes += decode_shapes
            sample_rows |= {shape.rows for shape in decode_shapes}
            decoded = []
        samplers = [
            SampleKey(rows, each)
            for rows in sorted(sample_rows)
            for each in (*COMMON_FEATURES, *RARE_FEATURES, MASKED_FEATURES)
        ]
        return [
            *self._multi_steps.warm_up(MultiStepKey(*each, num_steps) for each in decoded),
            *self._forwards.warm_up(prefill_shapes),
            *self._samplers.warm_up(samplers),
        ]

    @property
    def num_programs(self) -> int:
        """Programs that were compiled so far or are being compiled."""
        return self._forwards.num_programs + self._samplers.num_programs + self._multi_steps.num_programs

    def choose_shape(self, shape: StepShape, *, eventual: StepShape) -> StepShape:
        """Return the shape itself or that of a compiled larger program; `eventual` is the shape it will soon have."""
        return self._forwards.choose(shape, eventual=eventual)

    def precompile(self, shape: StepShape, features: SamplingFeatures) -> None:
        """Start compiling the forward and sample programs of a coming step."""
        key = SampleKey(shape.rows, features)
        self._forwards.start(self._forwards.choose(shape, eventual=shape))
        self._samplers.start(self._samplers.choose(key, eventual=key))

    def forward(
        self, shape: StepShape, weights: StepWeights, cache: Tree, slot_state: SlotState, inputs_BC: np.ndarray
    ) -> "Forwarded":
        """Run the model on the inputs."""
        forwarded: Forwarded = self._forwards.get(shape)(weights, cache, slot_state.last_token_N, inputs_BC)
        return forwarded

    def sample(
        self, slot_state: SlotState, output: "Forwarded", features: SamplingFeatures, mask_BW: np.ndarray | None
    ) -> tuple[SlotState, SampledTokens]:
        """Sample a token for every row, and store it in the slot state. `mask_BW`: if features.mask."""
        logits_BV, head_BC = output.logits_BV, output.head_BC
        key = SampleKey(logits_BV.shape[0], features)
        chosen = self._samplers.choose(key, eventual=key)
        masks = []
        if chosen.features.mask:
            masks = [np.full(self._mask_shape(key.rows), ALL_TOKENS, np.uint32) if mask_BW is None else mask_BW]
        slot_state, sampled = self._samplers.get(chosen)(slot_state, logits_BV, head_BC, *masks)
        return slot_state, sampled

    def choose_multi_step(self, key: MultiStepKey) -> MultiStepKey | None:
        """Return the multi-step program to use for this key; None while it is being compiled, unless deterministic."""
        chosen = self._multi_steps.choose(key, eventual=key)
        self._multi_steps.start(chosen)
        return chosen if self._deterministic or self._multi_steps.is_ready(chosen) else None

    def decode_multi(
        self,
        key: MultiStepKey,
        weights: StepWeights,
        cache: Tree,
        slot_state: SlotState,
        inputs_BC: np.ndarray | jax.Array,
    ) -> tuple[Tree, SlotState, jax.Array, SampledTokens, jax.Array | None]:
        """Decode `key.num_steps` tokens per row; return them as [num_steps, B], with the inputs of the next call.

        Entries beyond a row's remaining tokens are undefined. Experts are [B, num_steps, L, K].
        """
        cache, slot_state, next_BC, sampled, experts = self._multi_steps.get(key)(weights, cache, slot_state, inputs_BC)
        return cache, slot_state, next_BC, sampled, experts

    def wait_for_compiles(self) -> int:
        """Wait for all compilations; return the sum of `CompileCache.wait_for_compiles` over all programs."""
        return (
            self._forwards.wait_for_compiles()
            + self._samplers.wait_for_compiles()
            + self._multi_steps.wait_for_compiles()
        )

    def close(self) -> None:
        self._forwards.close()
        self._samplers.close()
        self._multi_steps.close()

    def _compile_forward(self, shape: StepShape) -> Program:
        forward = _make_forward(self._layout, self._sharder, shape, records_experts=self._records_experts)
        shardings: tuple[Any, ...] = (self._logits_sharding, self.cache_shardings, *3 * (self.replicated,))
        jitted = jax.jit(forward, donate_argnums=1, out_shardings=Forwarded(*shardings))
        is_long = self._sharder.platform == "gpu" and shape.rows * shape.tokens >= COMMAND_BUFFER_LIMIT
        options: dict[str, str | bool] | None = {"xla_gpu_enable_command_buffer": ""} if is_long else None
        inputs = self._abstract_inputs(shape.rows, num_columns(shape))
        last_token = self._abstract_slots().last_token_N
        lowered = jitted.lower(self._abstract_weights, self._abstract_caches, last_token, inputs)
        return lowered.compile(compiler_options=options)

    def _compile_sample(self, key: SampleKey) -> Program:
        config = self._model.config
        logits = jax.ShapeDtypeStruct(
            (key.rows, config.vocab_size), jnp.dtype(config.dtypes.logits.value), sharding=self._logits_sharding
        )
        jitted = jax.jit(_make_sample(key.features), donate_argnums=0, out_shardings=self.replicated)
        masks = [self._abstract_inputs(*self._mask_shape(key.rows))] if key.features.mask else []
        return jitted.lower(self._abstract_slots(), logits, self._abstract_inputs(key.rows, HEAD), *masks).compile()

    def _mask_shape(self, rows: int) -> tuple[int, int]:
        return rows, -(-self._model.config.vocab_size // 32)

    def _compile_multi_step(self, key: MultiStepKey) -> Program:
        hidden = _make_hidden(self._layout, self._sharder, key.shape, records_experts=self._records_experts)
        decode = _make_multi_step(self._layout, self._sharder, key, hidden, padding_slot=self.padding_slot)
        shardings = (self.cache_shardings, self.replicated, self.replicated, self.replicated, self.replicated)
        jitted = jax.jit(decode, donate_argnums=(1, 2), out_shardings=shardings)
        inputs = self._abstract_inputs(key.shape.rows, num_columns(key.shape))
        return jitted.lower(self._abstract_weights, self._abstract_caches, self._abstract_slots(), inputs).compile()

    def _abstract_inputs(self, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), jnp.uint32, sharding=self.replicated)

    def _abstract_slots(self) -> Any:
        """Return a SlotState of ShapeDtypeStructs."""
        slots, vocab = self._cache_spec.slots + 1, self._model.config.vocab_size
        state = jax.eval_shape(lambda: SlotState.empty(slots, vocab))
        return jax.tree.map(lambda leaf: _abstract(leaf, self.replicated), state)


def _make_forward(
    layout: WeightLayout, sharder: Sharder, shape: StepShape, *, records_experts: bool
) -> Callable[..., Forwarded]:
    hidden = _make_hidden(layout, sharder, shape, records_experts=records_experts)

    def forward(weights: StepWeights, cache: Tree, last_token_N: jax.Array, inputs_BC: jax.Array) -> Forwarded:
        params, inputs = weights.used(layout), StepInputs.unpack(inputs_BC, pages=shape.pages)
        adapters_B = weights.adapters_of(inputs.rows.slots_B)
        tokens_BT = inputs.tokens_BT[:, : shape.tokens] if shape.is_prefill else last_token_N[inputs.rows.slots_B, None]
        positions_BT = inputs.positions(shape.tokens)
        hidden_BTD, cache, experts = hidden(params, cache, tokens_BT, positions_BT, inputs.rows, adapters_B)
        scores = None
        if shape.is_scored:
            scores = score_prompts(layout.model, params, hidden_BTD, inputs.tokens_BT[:, 1:], sharder)
            last_B11 = jnp.maximum(jnp.sum(positions_BT >= 0, axis=1) - 1, 0)[:, None, None]
            hidden_BTD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)
        logits_BV = layout.model.logits(params, hidden_BTD, sharder)[:, 0]
        return Forwarded(logits_BV, cache, advance(inputs_BC[:, :HEAD], shape.tokens), experts, scores)

    return forward


def _make_hidden(
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
        adapters_B: jax.Array | None,
    ) -> tuple[jax.Array, Tree, jax.Array | None]:
        is_token_BT = positions_BT >= 0
        context = Context(
            positions=positions_BT,
            segments=is_token_BT.astype(jnp.int32),
            sharder=sharder,
            cache=cache,
            dropout_key=None,
            rows=rows,
            adapters_B=adapters_B,
            output_index=jnp.maximum(jnp.sum(is_token_BT, axis=1) - 1, 0) if is_last_only else None,
            is_fresh=shape.is_fresh,
            records_experts=records_experts,
        )
        output = layout.model.forward(params, tokens_BT, context)
        experts = layout.model.expert_ids(output, context) if records_experts else None
        return output.hidden_BTD, output.cache, experts

    return hidden


def _make_sample(features: SamplingFeatures) -> Callable[..., tuple[SlotState, SampledTokens]]:
    def sample_rows(
        slot_state: SlotState, logits_BV: jax.Array, head_BC: jax.Array, mask_BW: jax.Array | None = None
    ) -> tuple[SlotState, SampledTokens]:
        inputs = StepInputs.unpack(head_BC, pages=0)
        target_B = inputs.target_B
        usage_NV, sampled = sample_slots(features, slot_state, logits_BV, target_B, inputs.sampling, mask_BW)
        last_token_N = slot_state.last_token_N.at[target_B].set(jnp.maximum(sampled.token_B, 0))
        return slot_state._replace(last_token_N=last_token_N, usage_NV=usage_NV), sampled

    return sample_rows


def _make_multi_step(
    layout: WeightLayout, sharder: Sharder, key: MultiStepKey, hidden: Callable[..., Any], *, padding_slot: int
) -> Callable[..., tuple[Tree, SlotState, jax.Array, SampledTokens, jax.Array | None]]:
    """Return a scan over decode steps: tokens are fed back in the carry, and stored in the slot state at the end."""
    model = layout.model

    def decode(
        stored: StepWeights, cache: Tree, slot_state: SlotState, inputs_BC: jax.Array
    ) -> tuple[Tree, SlotState, jax.Array, SampledTokens, jax.Array | None]:
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
            hidden_B1D, cache, experts = hidden(weights, cache, last_B[:, None], position_B1, table, adapters_B)
            if key.features.is_greedy:
                logit_B, token_B = model.largest_logit(weights, hidden_B1D[:, 0], sharder)
                return (cache, usage_NV, token_B), (greedy_tokens(logit_B, token_B), experts)
            logits_BV = model.logits(weights, hidden_B1D, sharder)[:, 0]
            sampling = inputs.sampling._replace(position_B=inputs.start_B + number + 1)
            state = slot_state._replace(usage_NV=usage_NV)
            usage_NV, sampled = sample_slots(key.features, state, logits_BV, active_B, sampling)
            return (cache, usage_NV, jnp.maximum(sampled.token_B, 0)), (sampled, experts)

        initial = cache, slot_state.usage_NV, slot_state.last_token_N[slots_B]
        (cache, usage_NV, _), (sampled, experts) = jax.lax.scan(step, initial, jnp.arange(key.num_steps))
        experts = None if experts is None else jnp.moveaxis(experts[:, :, 0], 0, 1)
        active_B = jnp.where(inputs.remaining_B > 0, slots_B, padding_slot)
        last_step_B = jnp.clip(inputs.remaining_B, 1, key.num_steps) - 1
        last_B = sampled.token_B[last_step_B, jnp.arange(active_B.shape[0])]
        last_token_N = slot_state.last_token_N.at[active_B].set(jnp.maximum(last_B, 0))
        slot_state = slot_state._replace(last_token_N=last_token_N, usage_NV=usage_NV)
        return cache, slot_state, advance(inputs_BC, key.num_steps), sampled, experts

    return decode


def _abstract(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
