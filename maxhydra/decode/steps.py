"""The jitted steps of the engine: forward (prefill or decode), sample, and multi-step decode; compiled per bucket.

Forward and sample are separate programs, so their variants add up instead of multiplying. KV cache and slot state are
donated and stay on the device, where sampled tokens are fed back.

A row's arithmetic does not depend on other rows, but programs of different shapes may sum in a different order: the
logits of a sequence in different batches differ by rounding (about 1e-6 relative in float32), and its tokens only if
two candidates are closer than that.

B rows, T tokens per row, C input columns, N slots (the last one is the padding slot), V vocabulary, D model width, W
pages per row.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.decode import SpeculationMethod
from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.cache_arrays import CacheArrays, abstract_array
from maxhydra.decode.compile_cache import CompileCache, Program
from maxhydra.decode.draft_model import DraftLayout, ModelDrafter, make_fill
from maxhydra.decode.drafting import Drafter, Drafting, DraftState, NgramDrafter, TokenHistory
from maxhydra.decode.mtp_drafting import MtpDrafter
from maxhydra.decode.sampler import ALL_TOKENS, SampledTokens, SamplingFeatures
from maxhydra.decode.slot_state import SlotState
from maxhydra.decode.speculation import Verified, make_plain_steps, make_verify_steps
from maxhydra.decode.step_functions import (
    Decoded,
    Forwarded,
    MultiStepKey,
    SampleKey,
    make_forward,
    make_hidden,
    make_multi_step,
    make_sample,
)
from maxhydra.decode.step_inputs import HEAD, StepShape, num_columns
from maxhydra.decode.weight_layout import WeightLayout
from maxhydra.layers import AudioClips, PagedCacheSpec
from maxhydra.sharding import Sharder

Tree = Any
# Tokens from which on GPU kernels take longer than their launch. Command buffers (CUDA graphs), which need about a
# millisecond before the first kernel, do not pay from there on.
COMMAND_BUFFER_LIMIT = 1024


# Sampling features that a warm-up compiles for every bucket, and for the largest batch only.
GREEDY = SamplingFeatures(random=False, filters=False, penalties=False, logprobs=False, alternatives=False)
COMMON_FEATURES = (GREEDY, GREEDY._replace(random=True))
RARE_FEATURES = (
    GREEDY._replace(random=True, filters=True),
    SamplingFeatures(random=True, filters=True, penalties=True, logprobs=True, bias=True),
)
# Multi-step programs with masks have the longest context, for shorter ones too.
MASKED_FEATURES = (COMMON_FEATURES[-1]._replace(mask=True), RARE_FEATURES[-1]._replace(mask=True))


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
        drafting: Drafting | None = None,
        draft_layout: DraftLayout | None = None,
    ):
        """`weights`: used for their shapes and shardings only. `drafting`: multi-step programs use the token history.
        `draft_layout`: of the draft model, if there is one.

        `deterministic`: never substitute a larger program for the exact one, and wait for its compilation.
        `records_experts`: return the experts of all tokens, [B, T, L, K].
        """
        self._records_experts, self._drafting, self._draft_layout = records_experts, drafting, draft_layout
        model = layout.model
        self._layout, self._model, self._cache_spec, self._sharder = layout, model, cache_spec, sharder
        self._deterministic = deterministic
        self._abstract_weights = jax.tree.map(lambda leaf: abstract_array(leaf, leaf.sharding), weights)
        self.replicated = sharder.sharding(())
        self._logits_sharding = sharder.sharding(("act_batch", "act_vocab"))
        self._step_logits_sharding = sharder.sharding((None, "act_batch", "act_vocab"))
        has_mtp = drafting is not None and drafting.method is SpeculationMethod.mtp
        self.cache = CacheArrays(partial(model.empty_cache, has_mtp=has_mtp), cache_spec, sharder)
        self._forwards: CompileCache[StepShape] = CompileCache(self._compile_forward, deterministic=deterministic)
        self._samplers: CompileCache[SampleKey] = CompileCache(self._compile_sample, deterministic=deterministic)
        self._multi_steps: CompileCache[MultiStepKey] = CompileCache(
            self._compile_multi_step, deterministic=deterministic
        )
        self._fills: CompileCache[StepShape] = CompileCache(self._compile_fill, deterministic=deterministic)
        self._all: tuple[CompileCache[Any], ...] = (self._forwards, self._samplers, self._multi_steps, self._fills)

    @property
    def padding_slot(self) -> int:
        """The slot of padding rows."""
        return self._cache_spec.slots

    def init_state(self) -> tuple[Tree, SlotState]:
        """Allocate an empty KV cache and slot state on the device."""
        zeros = [jax.device_put(np.zeros(leaf.shape, leaf.dtype), self.replicated) for leaf in self._abstract_slots()]
        return self.cache.empty(), SlotState(*zeros)

    def warm_up(
        self, shapes: Iterable[StepShape], num_steps: int, verified_steps: Iterable[int]
    ) -> list[Future[Program]]:
        """Start compiling the programs of these buckets, for bursts of `num_steps`; return one future per program.

        `verified_steps`: of bursts whose tokens grammars verify. Rarely used sampling features have programs for the
        largest batch only, which smaller ones use too.
        """
        shapes = list(shapes)
        decode_shapes, prefill_shapes = [s for s in shapes if not s.is_prefill], [s for s in shapes if s.is_prefill]
        largest = sorted(decode_shapes, key=lambda shape: shape.size)[-1:]
        decoded = [(shape, features) for shape in decode_shapes for features in COMMON_FEATURES]
        decoded += [(shape, features) for shape in largest for features in RARE_FEATURES]
        sample_rows = {shape.rows for shape in prefill_shapes}
        drafting, most = self._drafting, max((shape.pages for shape in decode_shapes), default=0)
        masked = [(shape, MASKED_FEATURES[0]) for shape in decode_shapes if shape.pages == most]
        masked += [(shape, features) for shape in largest for features in MASKED_FEATURES[1:]]
        masked_keys = [MultiStepKey(*each, steps) for each in masked for steps in verified_steps]
        verified = [] if drafting is None else [(replace(each, tokens=drafting.step_tokens), f) for each, f in decoded]
        fills = [shape for shape in prefill_shapes if not shape.is_fresh] if self._draft_layout is not None else []
        if num_steps == 1:
            prefill_shapes += decode_shapes
            sample_rows |= {shape.rows for shape in decode_shapes}
            decoded = []
        if num_steps == 1 or drafting is not None:
            masked_keys = []
        samplers = [SampleKey(each.shape.rows, each.features, each.num_steps) for each in masked_keys] + [
            SampleKey(rows, each)
            for rows in sorted(sample_rows)
            for each in (*COMMON_FEATURES, *RARE_FEATURES, *MASKED_FEATURES)
        ]
        return [
            *self._multi_steps.warm_up(MultiStepKey(*each, num_steps) for each in decoded + verified),
            *self._multi_steps.warm_up(masked_keys),
            *self._forwards.warm_up(prefill_shapes),
            *self._samplers.warm_up(samplers),
            *self._fills.warm_up(fills),
        ]

    @property
    def num_programs(self) -> int:
        """Programs that were compiled so far or are being compiled."""
        return sum(cache.num_programs for cache in self._all)

    def choose_shape(self, shape: StepShape, *, eventual: StepShape) -> StepShape:
        """Return the shape itself or that of a compiled larger program; `eventual` is the shape it will soon have."""
        return self._forwards.choose(shape, eventual=eventual)

    def precompile(self, shape: StepShape, features: SamplingFeatures) -> None:
        """Start compiling the forward and sample programs of a coming step."""
        key = SampleKey(shape.rows, features)
        self._forwards.start(self._forwards.choose(shape, eventual=shape))
        self._samplers.start(self._samplers.choose(key, eventual=key))

    def forward(
        self,
        shape: StepShape,
        weights: StepWeights,
        cache: Tree,
        slot_state: SlotState,
        inputs_BC: np.ndarray | jax.Array,
        images: np.ndarray | None = None,
        audio: AudioClips | None = None,
    ) -> Forwarded:
        """Run the model on the inputs, and on the images and audio of a shape that has some."""
        more = [] if images is None and audio is None else [images, audio]
        forwarded: Forwarded = self._forwards.get(shape)(weights, cache, slot_state.last_token_N, inputs_BC, *more)
        return forwarded

    def sample(
        self,
        slot_state: SlotState,
        logits: jax.Array,
        head_BC: np.ndarray | jax.Array,
        features: SamplingFeatures,
        mask_BW: np.ndarray | jax.Array | None,
    ) -> tuple[SlotState, SampledTokens]:
        """Sample a token for every row, and store it in the slot state.

        `logits`: of a forward call, or of all steps of a multi-step call. `mask_BW`: if features.mask.
        """
        *steps, rows, _ = logits.shape
        key = SampleKey(rows, features, *steps)
        chosen = self._samplers.choose(key, eventual=key)
        masks: list[Any] = []
        if chosen.features.mask:
            masks = [np.full(self._mask_shape(rows), ALL_TOKENS, np.uint32) if mask_BW is None else mask_BW]
        slot_state, sampled = self._samplers.get(chosen)(slot_state, logits, head_BC, *masks)
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
        state: tuple[Tree, SlotState],
        inputs_BC: np.ndarray | jax.Array,
    ) -> Decoded:
        """Decode `key.num_steps` tokens per row."""
        decoded: Decoded = self._multi_steps.get(key)(weights, *state, inputs_BC)
        return decoded

    def decode_from_history(
        self,
        key: MultiStepKey,
        weights: StepWeights,
        state: tuple[Tree, SlotState, DraftState],
        inputs_BC: np.ndarray | jax.Array,
    ) -> tuple[tuple[Tree, SlotState, DraftState], jax.Array, Verified]:
        """Decode up to `key.num_steps * key.shape.tokens` tokens per row, with drafts if it has several tokens.

        `state`: KV cache, slots and drafts. Returns the updated state, the inputs of the next call, and the tokens.
        """
        cache, slot_state, draft_state, next_BC, verified = self._multi_steps.get(key)(weights, *state, inputs_BC)
        return (cache, slot_state, draft_state), next_BC, verified

    def choose_fill(self, shape: StepShape) -> StepShape | None:
        """Return the program that fills the draft model's cache; None while it is compiled, unless deterministic."""
        chosen = self._fills.choose(shape, eventual=shape)
        self._fills.start(chosen)
        return chosen if self._deterministic or self._fills.is_ready(chosen) else None

    def fill(self, shape: StepShape, weights: StepWeights, state: DraftState, inputs_BC: np.ndarray) -> DraftState:
        """Add tokens of the histories to the draft model's cache."""
        filled: DraftState = self._fills.get(shape)(weights, state, inputs_BC)
        return filled

    def wait_for_compiles(self) -> int:
        """Wait for all compilations; return the sum of `CompileCache.wait_for_compiles` over all programs."""
        return sum(cache.wait_for_compiles() for cache in self._all)

    def close(self) -> None:
        for cache in self._all:
            cache.close()

    def _compile_forward(self, shape: StepShape) -> Program:
        forward = make_forward(self._layout, self._sharder, shape, records_experts=self._records_experts)
        shardings: tuple[Any, ...] = (self._logits_sharding, self.cache.shardings, *4 * (self.replicated,))
        jitted = jax.jit(forward, donate_argnums=1, out_shardings=Forwarded(*shardings))
        is_long = self._sharder.platform == "gpu" and shape.rows * shape.tokens >= COMMAND_BUFFER_LIMIT
        options: dict[str, str | bool] | None = {"xla_gpu_enable_command_buffer": ""} if is_long else None
        inputs = self._abstract_inputs(shape.rows, num_columns(shape))
        last_token = self._abstract_slots().last_token_N
        lowered = jitted.lower(self._abstract_weights, self.cache.abstract, last_token, inputs, *self._media(shape))
        return lowered.compile(compiler_options=options)

    def _media(self, shape: StepShape) -> tuple[Any, ...]:
        """Abstract images and audio of a shape; none for one of text alone."""
        if not shape.images and not shape.clips:
            return ()
        config, array = self._model.config, partial(jax.ShapeDtypeStruct, sharding=self.replicated)
        rows, image_shape = shape.rows, config.vision.image_shape
        pixels = array((rows, shape.images, *image_shape), jnp.float32) if shape.images else None
        frames = array((rows, shape.clips, shape.frames, config.audio.num_bands), jnp.float32)
        audio = AudioClips(frames, array((rows, shape.clips), jnp.int32)) if shape.clips else None
        return pixels, audio

    def _compile_sample(self, key: SampleKey) -> Program:
        config = self._model.config
        steps = (key.logit_steps,) if key.logit_steps else ()
        sharding = self._step_logits_sharding if steps else self._logits_sharding
        shape = *steps, key.rows, config.vocab_size
        logits = jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtypes.logits.value), sharding=sharding)
        jitted = jax.jit(make_sample(key.features), donate_argnums=0, out_shardings=self.replicated)
        masks = [self._abstract_inputs(*self._mask_shape(key.rows))] if key.features.mask else []
        return jitted.lower(self._abstract_slots(), logits, self._abstract_inputs(key.rows, HEAD), *masks).compile()

    def _mask_shape(self, rows: int) -> tuple[int, int]:
        return rows, -(-self._model.config.vocab_size // 32)

    def _compile_multi_step(self, key: MultiStepKey) -> Program:
        hidden = make_hidden(self._layout, self._sharder, key.shape, records_experts=self._records_experts)
        inputs = self._abstract_inputs(key.shape.rows, num_columns(key.shape))
        state: tuple[Any, ...] = self.cache.abstract, self._abstract_slots()
        shardings: tuple[Any, ...] = self.cache.shardings, self.replicated
        drafting = self._drafting
        decode: Callable[..., Any]
        if drafting is not None:
            state = *state, self._abstract_drafts(drafting.context)
            shardings = *shardings, self._draft_shardings, *2 * (self.replicated,)
        else:
            step_results = self.replicated, self.replicated, self.replicated, self._step_logits_sharding
            shardings = Decoded(self.cache.shardings, self.replicated, *step_results)  # type: ignore[arg-type]
        if drafting is not None and key.shape.tokens > 1:
            size, drafter = self._cache_spec.page_size, self._make_drafter(drafting, key)
            decode = make_verify_steps(self._layout, self._sharder, key, hidden, drafter=drafter, page_size=size)
        else:
            plain = make_multi_step(self._layout, self._sharder, key, hidden, padding_slot=self.padding_slot)
            decode = plain if drafting is None else make_plain_steps(plain, key)
        donated = tuple(range(1, 1 + len(state)))
        jitted = jax.jit(decode, donate_argnums=donated, out_shardings=shardings)
        return jitted.lower(self._abstract_weights, *state, inputs).compile()

    def _make_drafter(self, drafting: Drafting, key: MultiStepKey) -> Drafter:
        if drafting.method is SpeculationMethod.mtp:
            return MtpDrafter(self._model, drafting, self._sharder)
        if (layout := self._draft_layout) is None:
            return NgramDrafter(drafting)
        return ModelDrafter(layout.weights, self._sharder, key.shape, drafting=drafting, features=key.features)

    def _compile_fill(self, shape: StepShape) -> Program:
        assert self._draft_layout is not None and self._drafting is not None
        fill = make_fill(self._draft_layout.weights, self._sharder, shape)
        jitted = jax.jit(fill, donate_argnums=1, out_shardings=self._draft_shardings)
        inputs = self._abstract_inputs(shape.rows, HEAD + shape.pages)
        return jitted.lower(self._abstract_weights, self._abstract_drafts(self._drafting.context), inputs).compile()

    @property
    def _draft_shardings(self) -> Any:
        """A DraftState of shardings."""
        layout, history = self._draft_layout, TokenHistory(*3 * (self.replicated,))  # type: ignore[arg-type]
        return DraftState(history, None if layout is None else layout.cache.shardings)

    def _abstract_drafts(self, context: int) -> DraftState:
        """Return a DraftState of ShapeDtypeStructs."""
        history = jax.eval_shape(lambda: TokenHistory.empty(self._cache_spec.slots + 1, context))
        abstract: TokenHistory = jax.tree.map(lambda leaf: abstract_array(leaf, self.replicated), history)
        return DraftState(abstract, None if self._draft_layout is None else self._draft_layout.cache.abstract)

    def _abstract_inputs(self, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), jnp.uint32, sharding=self.replicated)

    def _abstract_slots(self) -> Any:
        """Return a SlotState of ShapeDtypeStructs."""
        slots, vocab = self._cache_spec.slots + 1, self._model.config.vocab_size
        state = jax.eval_shape(lambda: SlotState.empty(slots, vocab))
        return jax.tree.map(lambda leaf: abstract_array(leaf, self.replicated), state)
