"""The runner of one mesh: weights, KV cache and slot state on its devices, and the calls that read and update them.

An engine has one runner, or two on separate devices: one prefills prompts, and the KV cache of each prompt is copied to
the other, which decodes.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from maxhydra.config.schema.decode import Engine as Config
from maxhydra.config.schema.decode import Pooling
from maxhydra.decode.adapters import AdapterLimits, AdapterStacks, StepWeights
from maxhydra.decode.cache_arrays import make_cache_spec
from maxhydra.decode.compile_cache import Program
from maxhydra.decode.draft_model import DraftModel, place_draft_model
from maxhydra.decode.draft_policy import DraftPolicy, make_policy
from maxhydra.decode.drafting import Drafting
from maxhydra.decode.grammar import join_masks
from maxhydra.decode.histories import Histories
from maxhydra.decode.mask_policy import make_mask_policy
from maxhydra.decode.page_pool import Capacity, Place
from maxhydra.decode.pending import (
    PendingExperts,
    PendingTokens,
    PendingVerified,
    PrefillOutput,
    group_rejected,
    start_copy,
)
from maxhydra.decode.pooling import Pooler
from maxhydra.decode.prompt_scores import PendingScores
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.decode.sequence import Sequence
from maxhydra.decode.slot_state import SlotState, set_controls
from maxhydra.decode.step_functions import Forwarded, MultiStepKey
from maxhydra.decode.step_inputs import (
    Buckets,
    StepShape,
    audio_inputs,
    decode_inputs,
    image_inputs,
    prefill_inputs,
    resample_inputs,
    sampling_features,
)
from maxhydra.decode.steps import CompiledSteps
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

Tree = Any
MaskMaker = Callable[[list[Sequence | None]], np.ndarray | jax.Array]
# Default number of steps per multi-step call on an accelerator, where a single step takes less time than the host's
# work for it.
MULTI_STEPS = 8
# Default maximum number of tokens per prefill call, on a CPU and on an accelerator.
PREFILL_CHUNK = {True: 256, False: 1024}


class ResidentInputs(NamedTuple):
    """Inputs that a decode call left on the device, reused if the next call continues the same rows."""

    key: MultiStepKey | StepShape
    progress: list[tuple[int, int]]
    """Of each sequence its number and its computed tokens; see `Runner._progress`."""
    inputs_BC: jax.Array


class Runner:
    """Dispatches steps; all results stay on the devices."""

    def __init__(
        self,
        model: ModelDef,
        params: Tree,
        config: Config,
        *,
        sharder: Sharder,
        prefix_cache: bool,
        records_experts: bool = False,
        adapters: AdapterLimits | None = None,
        draft_model: DraftModel | None = None,
    ):
        """`params`: in the standard layout. `adapters`: None if sequences have no adapters. `draft_model`: of a runner
        that decodes with speculation.method=model."""
        is_cpu, groups = jax.default_backend() == "cpu", sharder.num_shards("act_batch")
        self.multi_steps = config.burst or (1 if is_cpu else MULTI_STEPS)
        pages = -(-config.cache_tokens // config.page_size)
        longest = -(-(config.max_context or model.config.context_length) // config.page_size)
        # A sequence is in one group: on several groups it may be as long as on one.
        pages = max(pages, groups * min(pages, longest))
        sizes = {"slots": config.max_batch, "pages": pages, "page_size": config.page_size}
        self.capacity = Capacity(groups, **sizes, prefix_cache=prefix_cache)
        self.buckets = Buckets(
            groups,
            config.page_size,
            min(longest, self.capacity.pages_per_group),
            prefill_chunk=config.prefill_chunk or PREFILL_CHUNK[is_cpu],
            is_coarse=bool(config.warm_up) or not is_cpu,
        )
        cache_spec = make_cache_spec(config, self.capacity, groups)
        self.sharder, self._shardings = sharder, sharder.tree(model.axes)
        self._layout = choose_weight_layout(model, sharder, jax.default_backend())
        self._params, self.version = self.prepare_params(params), 0
        self.adapters: AdapterStacks | None = None
        if adapters is not None:
            self.adapters = AdapterStacks(adapters, self._layout, sharder, num_slots=self.capacity.num_slots)
            self._layout = self.adapters.layout
        self._draft_layout, self._draft_params = place_draft_model(draft_model, cache_spec, sharder)
        self._drafting = Drafting.of(config.speculation, self.buckets.max_pages * config.page_size)
        # Which programs are ready differs between processes.
        deterministic = config.deterministic or jax.process_count() > 1
        self.programs = CompiledSteps(
            self._layout,
            self._weights,
            cache_spec,
            sharder=sharder,
            deterministic=deterministic,
            records_experts=records_experts,
            drafting=self._drafting,
            draft_layout=self._draft_layout,
        )
        self._policy = None if self._drafting is None else make_policy(self._drafting, is_measured=not deterministic)
        self.mask_policy = make_mask_policy(config, model.config, self.multi_steps, is_measured=not deterministic)
        self._cache, self._slot_state = self.programs.init_state()
        self._pooler = Pooler(self._layout, sharder)
        self._resident: ResidentInputs | None = None
        self._num_mask_words = -(-model.config.vocab_size // 32)

    def warm_up(self, *, is_prefilling: bool, is_decoding: bool) -> list[Future[Program]]:
        """Start compiling a program for every batch; return one future per program."""
        shapes = self.buckets.all_shapes(self.capacity.slots_per_group)
        needed = [shape for shape in shapes if (is_prefilling if shape.is_prefill else is_decoding)]
        if is_decoding and self._drafting is not None:
            self._histories.warm_up()
        return self.programs.warm_up(needed, self.multi_steps, self.mask_policy.step_counts)

    @property
    def decodes_single_steps(self) -> bool:
        """Whether decode calls without drafts are one step of one token per row."""
        return self.multi_steps == 1

    @property
    def draft_steps(self) -> dict[str, int] | None:
        """Numbers of decode steps by name (DraftPolicy.counts); None without speculative decoding."""
        return None if self._policy is None else self._policy.counts

    @cached_property
    def _histories(self) -> Histories:
        assert self._drafting is not None
        cache = None if self._draft_layout is None else self._draft_layout.cache
        return Histories(self.programs, self.buckets, self._drafting.context, draft_cache=cache)

    def prepare_params(self, params: Tree) -> Tree:
        """Convert weights of the standard layout, possibly on other devices, to those that `set_params` takes."""
        first = jax.tree.leaves(params)[0]
        if isinstance(first, jax.Array) and first.sharding.device_set.isdisjoint(self.sharder.mesh.devices.flat):
            params = jax.device_put(params, self._shardings)
        return self._layout.keep(params)

    def set_params(self, params: Tree, version: int = 0) -> None:
        """Use other weights of the same shapes from the next call on; the prefix cache is cleared."""
        self._params, self.version = params, version
        self.capacity.clear_prefix_cache()

    def replaced(self, slot: int, weights: Tree) -> Tree:
        """The stacks of adapters with other weights in one slot, for `set_adapters`."""
        assert self.adapters is not None
        return self.adapters.replaced(slot, weights)

    def set_adapters(self, stacks: Tree) -> None:
        """Use other stacks of adapters from the next call on."""
        assert self.adapters is not None
        self.adapters.stacks = stacks

    @property
    def _weights(self) -> StepWeights:
        if self.adapters is None:
            return StepWeights(self._params, draft=self._draft_params)
        return StepWeights(self._params, self.adapters.stacks, self.adapters.adapter_N, self._draft_params)

    def _assign_adapters(self, sequences: Iterable[tuple[Place | None, Sequence]]) -> None:
        """Let the next calls use the adapters of these sequences in their slots."""
        if self.adapters is not None:
            self.adapters.assign(
                {place.slot: each.adapter.slot if each.adapter else 0 for place, each in sequences if place is not None}
            )

    def prefill(self, chunks: List[PrefillChunk]) -> PrefillOutput:
        """Prefill prompt chunks, and sample the first token of each prompt that is complete with its chunk."""
        self.mask_policy.interrupt()
        if self._policy is not None:
            self._policy.interrupt()
        self._assign_adapters((chunk.place, chunk.sequence) for chunk in chunks)
        needed = self.buckets.prefill_shape(chunks)
        shape = self.programs.choose_shape(needed, eventual=needed)
        rows = self.buckets.arrange_rows(chunks, shape)
        completed = [chunk.sequence if chunk is not None and chunk.is_last else None for chunk in rows]
        for chunk in chunks:
            if chunk.is_last:
                self.set_controls(chunk.place, chunk.sequence)
        inputs_BC = prefill_inputs(rows, shape, self.programs.padding_slot)
        output = self._forward(shape, inputs_BC, image_inputs(rows, shape), audio_inputs(rows, shape))
        first_tokens = None
        if any(completed):
            first_tokens = self._sample(completed, output.logits_BV, output.head_BC, self._known_masks)
        records: list[PendingExperts | PendingScores] = []
        if output.experts_BTLK is not None:
            sequences = [None if chunk is None else chunk.sequence for chunk in rows]
            counts = [0 if chunk is None else chunk.length for chunk in rows]
            records.append(PendingExperts(sequences, counts, output.experts_BTLK))
        if output.scores is not None:
            records.append(PendingScores(rows, output.scores, self.version))
        if records:
            none = PendingTokens([None] * len(rows), None, [0] * len(rows), self.version)
            first_tokens = (first_tokens or none)._replace(records=tuple(records))
        return PrefillOutput(first_tokens, output.logits_BV)

    def pool(
        self, rows: List[List[int]], pooling: Pooling, *, call: Callable[[Callable[[], jax.Array]], jax.Array]
    ) -> np.ndarray:
        """Pooled hidden states [N, D] of token sequences. `call`: runs a function in the engine's thread.

        Programs are compiled in the thread of the caller, so that decode steps do not wait for them.
        """
        vectors: dict[int, np.ndarray] = {}
        for batch in self._pooler.batches(rows):
            program = self._pooler.program(self._weights, batch, pooling)
            pooled = call(partial(program, self._weights, batch.tokens_BT, batch.lengths_B))
            vectors |= dict(zip(batch.numbers, np.asarray(pooled), strict=False))
        return np.stack([vectors[number] for number in range(len(rows))])

    def decode(self, sequences: list[Sequence], shape: StepShape, next_masks: MaskMaker) -> PendingTokens:
        """Decode one token per sequence. `next_masks`: called while the model runs, if a sequence has a grammar."""
        if self._policy is not None:
            self._histories.pause_drafts(sequences)
            self._histories.forget(sequences)
            on_arrival = self._policy.start(1, is_speculative=False)
        else:
            on_arrival = self.mask_policy.start(sequences, num_steps=0)
        self._assign_adapters((sequence.place, sequence) for sequence in sequences)
        rows, inputs_BC = self._decode_inputs(shape, shape, sequences)
        output = self._forward(shape, inputs_BC)
        for sequence in sequences:
            sequence.num_computed += 1
        assert output.next_BC is not None
        self._keep_inputs(shape, sequences, output.next_BC)
        ids = output.experts_BTLK
        pending = self._sample(rows, output.logits_BV, output.head_BC, next_masks)._replace(on_arrival=on_arrival)
        return pending if ids is None else pending._replace(records=(PendingExperts(rows, pending.counts, ids),))

    def decode_multi(self, sequences: list[Sequence]) -> PendingTokens | None:
        """Decode several tokens per sequence in one call; None if that program is being compiled, or masks are needed.

        All calls have the same number of steps, unless grammars verify the tokens (mask_policy.py). Steps beyond the
        last token of a row are masked: this needs fewer programs, and makes calls a function of the requests alone.
        """
        if (num_steps := self.mask_policy.choose_steps(sequences)) == 0:
            return None
        if self._policy is not None:
            return self._decode_from_history(sequences, self._policy)
        if self.multi_steps == 1:
            return None
        features = sampling_features(sequences)
        shape = self.buckets.decode_shape(sequences, lookahead=num_steps - 1, extra_rows=0)
        key = self.programs.choose_multi_step(MultiStepKey(shape, features, num_steps))
        if key is not None and features.mask and not self.mask_policy.fits_logits(key.shape.rows, key.num_steps):
            # A larger program, which takes the place of the exact one, would keep more logits.
            key = self.programs.choose_multi_step(MultiStepKey(shape, features, self.mask_policy.step_counts[0]))
        if key is None:
            return None
        on_arrival = self.mask_policy.start(sequences, num_steps=key.num_steps)
        self._assign_adapters((sequence.place, sequence) for sequence in sequences)
        rows, inputs_BC = self._decode_inputs(key, key.shape, sequences)
        decoded = self.programs.decode_multi(key, self._weights, (self._cache, self._slot_state), inputs_BC)
        self._cache, self._slot_state = decoded.cache, decoded.slot_state
        counts = [0 if sequence is None else min(key.num_steps, sequence.remaining) for sequence in rows]
        for sequence, count in zip(rows, counts, strict=True):
            if sequence is not None:
                sequence.num_computed += count
        self._keep_inputs(key, sequences, decoded.next_BC)
        ids = decoded.experts_BSLK
        records = () if ids is None else (PendingExperts(rows, counts, ids),)
        pending = start_copy(rows, decoded.sampled, counts, self.version)._replace(records=records)
        if features.mask:
            num_restarts = [0 if each is None else each.num_restarts for each in rows]
            pending = pending._replace(num_restarts=num_restarts, logits_SBV=decoded.logits_SBV)
        return pending._replace(on_arrival=on_arrival)

    def resample(self, sequences: list[Sequence]) -> list[PendingTokens]:
        """Sample tokens that grammars rejected again, with masks, from the logits of their calls."""
        resampled = []
        for logits_SBV, version, rows in group_rejected(sequences):
            head_BC = resample_inputs(rows, self.programs.padding_slot)
            resampled.append(self._sample(rows, logits_SBV, head_BC, self._known_masks)._replace(version=version))
            for each in filter(None, rows):
                each.rejected = None
        return resampled

    def _decode_from_history(self, sequences: list[Sequence], policy: DraftPolicy) -> PendingTokens | None:
        """Decode with or without drafts; None for a plain single step, or while the programs are being compiled.

        Of a speculative call, the host counts one token per step until it has read the tokens, see
        `Sequence.num_uncertain`.
        """
        steps = self.multi_steps

        def make_key(tokens: int) -> MultiStepKey:
            shape = self.buckets.history_shape(sequences, tokens, num_steps=steps)
            return MultiStepKey(shape, sampling_features(sequences), steps)

        key = None
        if policy.is_worthwhile(sequences, make_key):
            key = self.programs.choose_multi_step(make_key(policy.drafting.step_tokens))
            if key is not None and not self._histories.fill(sequences, self._weights, policy.interrupt):
                key = None
        if key is None and steps > 1:
            key = self.programs.choose_multi_step(make_key(1))
        if key is None:
            return None
        is_speculative = key.shape.tokens > 1
        self._assign_adapters((sequence.place, sequence) for sequence in sequences)
        self._histories.add(sequences)
        if not is_speculative:
            self._histories.pause_drafts(sequences)
        rows, inputs_BC = self._decode_inputs(key, key.shape, sequences)
        state = self._cache, self._slot_state, self._histories.arrays
        state, inputs_BC, verified = self.programs.decode_from_history(key, self._weights, state, inputs_BC)
        self._cache, self._slot_state, self._histories.arrays = state
        on_arrival = policy.start(steps, is_speculative=is_speculative)
        is_exact = not is_speculative and not any(sequence.num_uncertain for sequence in sequences)
        most = None if is_exact else steps * key.shape.tokens
        counts = [0 if sequence is None else sequence.count_least(steps, most) for sequence in rows]
        self._keep_inputs(key, sequences, inputs_BC)
        result = None if is_exact else PendingVerified(verified.is_used, verified.drafted_B, verified.accepted_B)
        ids = verified.experts
        records = () if ids is None else (PendingExperts(rows, counts, ids, result and result.is_used_TB),)
        for array in jax.tree.leaves(result):
            array.copy_to_host_async()
        pending = start_copy(rows, verified.sampled, counts, self.version)
        return pending._replace(records=records, verified=result, on_arrival=on_arrival)

    def _decode_inputs(
        self, key: MultiStepKey | StepShape, shape: StepShape, sequences: list[Sequence]
    ) -> tuple[list[Sequence | None], np.ndarray | jax.Array]:
        """Return the rows of a decode call and its inputs: those on the device if it continues the previous call."""
        resident, rows = self._resident, self.buckets.arrange_rows(sequences, shape)
        if resident is not None and resident.key == key and resident.progress == self._progress(key, sequences):
            return rows, resident.inputs_BC
        return rows, decode_inputs(rows, shape, self.programs.padding_slot)

    def _keep_inputs(self, key: MultiStepKey | StepShape, sequences: list[Sequence], inputs_BC: jax.Array) -> None:
        self._resident = ResidentInputs(key, self._progress(key, sequences), inputs_BC)

    def _progress(self, key: MultiStepKey | StepShape, sequences: list[Sequence]) -> list[tuple[int, int]]:
        """Number and computed tokens of each sequence. Calls with a history take the latter from there."""
        has_history = self._policy is not None and isinstance(key, MultiStepKey)
        return [(sequence.number, 0 if has_history else sequence.num_computed) for sequence in sequences]

    def take_state(self) -> tuple[Tree, SlotState]:
        """Return KV cache and slot state, to be replaced by `put_state` if they are donated."""
        return self._cache, self._slot_state

    def put_state(self, cache: Tree, slot_state: SlotState) -> None:
        self._cache, self._slot_state = cache, slot_state

    def upload(self, masks_BW: np.ndarray) -> np.ndarray | jax.Array:
        """Start the copy of masks to the device; several processes leave it to the call that uses them."""
        return jax.device_put(masks_BW, self.programs.replicated) if jax.process_count() == 1 else masks_BW

    def wait(self) -> None:
        """Wait until all dispatched calls have finished."""
        jax.block_until_ready(self._slot_state)

    def set_controls(self, place: Place, sequence: Sequence) -> None:
        """Set what the penalties and the logit bias of the request need in the state of a slot."""
        if sequence.has_penalty or sequence.request.logit_bias:
            self._slot_state = set_controls(self._slot_state, place.slot, sequence.request)

    def _forward(self, shape: StepShape, inputs_BC: np.ndarray | jax.Array, *media: Any) -> Forwarded:
        output = self.programs.forward(shape, self._weights, self._cache, self._slot_state, inputs_BC, *media)
        self._cache = output.cache
        return output

    def _known_masks(self, rows: list[Sequence | None]) -> np.ndarray:
        return join_masks([None if each is None else each.constraint for each in rows], self._num_mask_words)

    def _sample(
        self, rows: list[Sequence | None], logits: jax.Array, head_BC: np.ndarray | jax.Array, make_masks: MaskMaker
    ) -> PendingTokens:
        features = sampling_features(rows)
        mask_BW = make_masks(rows) if features.mask else None
        self._slot_state, sampled = self.programs.sample(self._slot_state, logits, head_BC, features, mask_BW)
        return start_copy(rows, sampled, [int(sequence is not None) for sequence in rows], self.version)
