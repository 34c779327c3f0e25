"""The decode engine: one thread that prefills prompts, decodes many sequences together and emits their tokens.

The device runs one iteration ahead of the host. An iteration dispatches a prefill call for waiting prompts, then a
decode step of all running sequences, and only then reads the tokens of the previous iteration. A sequence that turns
out to be finished has by then sampled one token too many, which is dropped; the cache pages that this token wrote are
overwritten before anyone reads them.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List
from concurrent.futures import as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.decode import CacheDtype
from maxhydra.config.schema.decode import Engine as Config
from maxhydra.config.schema.run import Progress
from maxhydra.data import Tokenizer
from maxhydra.decode.inbox import Inbox
from maxhydra.decode.page_pool import Capacity
from maxhydra.decode.request import Handle, Request, RequestRejectedError, TokenLogprob
from maxhydra.decode.runner import Runner
from maxhydra.decode.sampler import MAX_LOGPROBS, SampledTokens
from maxhydra.decode.scheduler import PrefillChunk, Scheduler
from maxhydra.decode.sequence import Sequence, find_problem
from maxhydra.decode.step_inputs import Buckets, StepShape, decode_inputs, prefill_inputs, sampling_features
from maxhydra.decode.steps import MultiStepKey
from maxhydra.layers import PagedCacheSpec
from maxhydra.model import ModelDef
from maxhydra.runtime.profiler import Profiler
from maxhydra.runtime.progress import open_item_progress
from maxhydra.sharding import Sharder

Tree = Any
CACHE_DTYPES = {
    CacheDtype.auto: None,
    CacheDtype.float32: jnp.dtype(jnp.float32),
    CacheDtype.bfloat16: jnp.dtype(jnp.bfloat16),
    CacheDtype.int8: jnp.dtype(jnp.int8),
    CacheDtype.float8: jnp.dtype(jnp.float8_e4m3fn),
}
# Default number of steps per multi-step call on an accelerator, where a single step takes less time than the host's
# work for it.
MULTI_STEPS = 8
# Default maximum number of tokens per prefill call, on a CPU and on an accelerator.
PREFILL_CHUNK = {True: 256, False: 1024}
# Pages before the end of the current context bucket at which the next bucket is compiled.
PRECOMPILE_PAGES = 2


class PendingTokens(NamedTuple):
    """Tokens that were dispatched to the device and not read yet."""

    sequences: list[Sequence | None]
    """The sequence of each row; None for rows that sample nothing, such as an unfinished prefill."""
    sampled: SampledTokens
    """Of one step [B], or of a multi-step call [steps, B]."""
    counts: list[int]
    """Valid tokens of each row."""


class ResidentInputs(NamedTuple):
    """Step inputs that a multi-step call left on the device, reused if the next call continues the same rows."""

    key: MultiStepKey
    sequences: list[Sequence]
    num_computed: list[int]
    inputs_BC: jax.Array


class Engine:
    """Decodes many sequences together, each as if it were alone. All public methods are thread-safe."""

    def __init__(
        self,
        model: ModelDef,
        params: Tree,
        tokenizer: Tokenizer,
        config: Config,
        *,
        sharder: Sharder,
        eos: Collection[int],
        profiler: Profiler | None = None,
    ):
        """`eos`: token ids that end a completion. `profiler`: profiles iterations, counted from 1."""
        self._profiler = profiler
        self._tokenizer, self._eos = tokenizer, frozenset(eos)
        self._vocab_size, self._max_batch = model.config.vocab_size, config.max_batch
        self._max_context = config.max_context or model.config.context_length
        prefix_cache = not model.config.is_recurrent if config.prefix_cache is None else config.prefix_cache
        is_cpu = jax.default_backend() == "cpu"
        prefill_chunk = config.prefill_chunk or PREFILL_CHUNK[is_cpu]
        groups = sharder.num_shards("act_batch")
        capacity = Capacity(
            groups,
            slots=config.max_batch,
            pages=-(-config.cache_tokens // config.page_size),
            page_size=config.page_size,
            prefix_cache=prefix_cache,
        )
        self._buckets = Buckets(
            groups,
            config.page_size,
            min(-(-self._max_context // config.page_size), capacity.pages_per_group),
            prefill_chunk=prefill_chunk,
            is_coarse=bool(config.warm_up) or not is_cpu,
        )
        self._scheduler = Scheduler(capacity, prefill_chunk=prefill_chunk, round_tokens=self._buckets.round_tokens)
        self._multi_steps = config.burst or (1 if is_cpu else MULTI_STEPS)
        storage = CACHE_DTYPES[config.cache_dtype]
        cache_spec = PagedCacheSpec(
            capacity.num_pages, config.page_size, slots=capacity.num_slots, storage=storage, groups=groups
        )
        # Which programs are ready differs between processes.
        deterministic = config.deterministic or jax.process_count() > 1
        self._runner = Runner(model, params, cache_spec, sharder=sharder, deterministic=deterministic)
        self._programs = self._runner.programs
        self._pending: deque[PendingTokens] = deque()
        self._resident: ResidentInputs | None = None
        self._num_prefilled = self._num_generated = 0

        self._inbox = Inbox(self._make_sequence)
        self._failure = ""
        if config.warm_up:
            self._warm_up()
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)
        self._thread.start()

    def _warm_up(self) -> None:
        """Compile a program for every batch, with a progress bar."""
        shapes = self._buckets.all_shapes(self._scheduler.capacity.slots_per_group)
        futures = self._programs.warm_up(shapes, self._multi_steps)
        with open_item_progress(Progress.auto, total=len(futures), start=0, verb="compiled") as progress:
            for completed, future in enumerate(as_completed(futures), 1):
                future.result()
                progress.update(completed, 0)

    def submit(self, request: Request) -> Handle:
        """Queue a request; raise RequestRejectedError at once if it can never be served."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Iterable[Request]) -> list[Handle]:
        """Queue several requests atomically; raise RequestRejectedError and queue none if one can never be served."""
        sequences = [self._make_sequence(request) for request in requests]
        self._inbox.submit(sequences)
        return [sequence.handle for sequence in sequences]

    def _make_sequence(self, request: Request) -> Sequence:
        self._reject_if(find_problem(request, vocab_size=self._vocab_size, max_logprobs=MAX_LOGPROBS))
        length, limit = len(request.prompt), self._max_context
        if length >= limit:
            self._reject_if(
                f"the prompt has {length} tokens, but prompt and completion together may have at most {limit}: "
                "shorten it, or raise task.engine.max_context"
            )
        sequence = Sequence(request, budget=min(request.max_tokens, limit - length))
        capacity = self._scheduler.capacity
        most, groups = capacity.pages_per_group * capacity.page_size, len(capacity.pools)
        if sequence.cache_tokens > most:
            where = "" if groups == 1 else f" on each of the {groups} groups of devices that share a batch"
            self._reject_if(
                f"prompt and completion need {sequence.cache_tokens} tokens of KV cache, which holds {most}{where}: "
                f"raise task.engine.cache_tokens, or lower max_tokens={request.max_tokens}"
            )
        return sequence

    def stats(self) -> dict[str, float]:
        """Return counts of running and waiting sequences, used and cached pages, generated and prefilled tokens."""
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running) + len(scheduler.prefilling),
            "waiting": len(scheduler.waiting) + self._inbox.num_submitted,
            "pages": scheduler.capacity.num_pages,
            "pages_used": scheduler.capacity.num_used,
            "pages_kept": scheduler.capacity.num_cached,
            "tokens_written": self._num_generated,
            "prompt_tokens_read": self._num_prefilled,
            "programs_compiled": self._programs.num_programs,
        }

    def update_params(self, params: Tree) -> None:
        """Replace the weights by others of the same shapes, from the next step on.

        The prefix cache is cleared; running sequences continue on their existing KV cache.
        """
        self._inbox.barrier(self._runner.prepare_params(params))

    def synchronize(self) -> None:
        """Wait until every process has dispatched all steps of finished sequences; a collective call.

        Only then may other threads dispatch programs: the order must be the same in all processes.
        """
        if self._inbox.is_shared:
            self._inbox.barrier()

    def follow(self) -> None:
        """Run the requests of process 0 until it closes the engine; for all other processes."""
        self._thread.join()
        if self._failure:
            raise RuntimeError(self._failure)

    def wait_for_compiles(self) -> int:
        """Wait until nothing is being compiled; return a count that is stable once all needed programs exist.

        It grows whenever a program was compiled or a larger one substituted for the exact one since the last call.
        """
        return self._programs.wait_for_compiles()

    def close(self) -> None:
        """Stop the engine's thread; unfinished sequences end with finish="cancelled"."""
        self._inbox.close()
        self._thread.join()

    def _reject_if(self, reason: str | None) -> None:
        if reason is not None:
            raise RequestRejectedError(reason)

    def _run(self) -> None:
        """Run iterations until closed. After any failure, every handle receives an error."""
        try:
            for number in itertools.count(1):
                if not self._admit():
                    break
                profiler = self._profiler
                with profiler.profile_iteration(number, self._runner.wait) if profiler else contextlib.nullcontext():
                    self._step()
        except Exception as error:
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            submitted = self._inbox.end(self._failure or "the engine is closed")
            for sequence in [*self._scheduler.sequences(), *submitted]:
                if self._failure:
                    sequence.fail(self._failure)
                else:
                    sequence.cancel()
            self._runner.close()

    def _admit(self) -> bool:
        """Wait for work, then queue new sequences and swap in new weights; return False if closing."""
        is_busy = bool(self._pending) or not self._scheduler.is_idle
        turn = self._inbox.take(is_busy=is_busy, admitted=self._scheduler.sequences)
        for sequence in turn.sequences:
            self._scheduler.add(sequence)
        if turn.params is not None:
            self._runner.set_params(turn.params)
            self._scheduler.capacity.clear_prefix_cache()
        self._scheduler.drop(turn.cancelled)
        return not turn.is_last

    def _step(self) -> None:
        """Dispatch one prefill call and one decode call, then emit the tokens of the previous iteration."""
        num_earlier = len(self._pending)
        # As many prefill calls as decode steps, so that free slots are soon in use.
        for _ in range(self._multi_steps):
            if not self._prefill():
                break
        self._decode()
        for _ in range(num_earlier):
            self._emit(self._pending.popleft())

    def _prefill(self) -> bool:
        """Dispatch prompt chunks; a prompt that is complete with its chunk gets its first token sampled."""
        chunks = self._scheduler.next_chunks()
        self._scheduler.mark_prefilled(chunks)
        for call in self._buckets.split_prefill(chunks) if chunks else ():
            self._prefill_chunks(call)
        return bool(chunks)

    def _prefill_chunks(self, chunks: List[PrefillChunk]) -> None:
        needed = self._buckets.prefill_shape(chunks)
        shape = self._programs.choose_shape(needed, eventual=needed)
        rows = self._buckets.arrange_rows(chunks, shape)
        completed = [chunk.sequence if chunk is not None and chunk.is_last else None for chunk in rows]
        for chunk in chunks:
            if chunk.is_last:
                self._runner.mark_prompt(chunk.place.slot, chunk.sequence.request)
        if self._multi_steps == 1 and (running := self._scheduler.next_rows()):
            self._programs.precompile(self._decode_shape(running), sampling_features(running))
        self._num_prefilled += sum(chunk.length for chunk in chunks)
        logits_BV, head_BC = self._runner.forward(shape, prefill_inputs(rows, shape, self._runner.padding_slot))
        if any(completed):
            self._sample(completed, logits_BV, head_BC)

    def _decode(self) -> None:
        """Dispatch a decode step of every running sequence, or a multi-step call."""
        rows = self._scheduler.next_rows()
        if not rows or self._decode_multi(rows):
            return
        shape = self._decode_shape(rows)
        self._precompile(rows, shape)
        arranged = self._buckets.arrange_rows(rows, shape)
        logits_BV, head_BC = self._runner.forward(shape, decode_inputs(arranged, shape, self._runner.padding_slot))
        for sequence in rows:
            sequence.num_computed += 1
        self._sample(arranged, logits_BV, head_BC)

    def _decode_multi(self, rows: list[Sequence]) -> bool:
        """Dispatch several decode steps in one call; False while that program is being compiled.

        All calls have the same number of steps. Steps beyond a row's last token are masked, which costs less than a
        program for every number of steps, and makes the calls a function of the requests alone.
        """
        if self._multi_steps == 1:
            return False
        shape = self._buckets.decode_shape(rows, lookahead=self._multi_steps - 1, extra_rows=0)
        key = self._programs.choose_multi_step(MultiStepKey(shape, sampling_features(rows), self._multi_steps))
        if key is None:
            return False
        resident, num_computed = self._resident, [sequence.num_computed for sequence in rows]
        arranged = self._buckets.arrange_rows(rows, key.shape)
        if resident is not None and resident[:3] == (key, rows, num_computed):
            inputs_BC: np.ndarray | jax.Array = resident.inputs_BC
        else:
            inputs_BC = decode_inputs(arranged, key.shape, self._runner.padding_slot)
        inputs_BC, sampled = self._runner.decode_multi(key, inputs_BC)
        counts = [0 if sequence is None else min(key.num_steps, sequence.remaining) for sequence in arranged]
        for sequence, count in zip(arranged, counts, strict=True):
            if sequence is not None:
                sequence.num_computed += count
                sequence.num_scheduled += count
        self._resident = ResidentInputs(key, rows, [sequence.num_computed for sequence in rows], inputs_BC)
        self._enqueue(PendingTokens(arranged, sampled, counts))
        return True

    def _decode_shape(self, rows: list[Sequence]) -> StepShape:
        """Return the bucket for decoding these rows; while others are about to join, preferably one for all."""
        num_joining = len(self._scheduler.waiting) + len(self._scheduler.prefilling)
        extra_rows = min(num_joining, self._max_batch - len(rows))
        needed = self._buckets.decode_shape(rows, lookahead=0, extra_rows=0)
        eventual = self._buckets.decode_shape(rows, lookahead=0, extra_rows=extra_rows)
        return self._programs.choose_shape(needed, eventual=eventual)

    def _precompile(self, rows: list[Sequence], shape: StepShape) -> None:
        """Compile the next context bucket before it is needed."""
        lookahead = PRECOMPILE_PAGES * self._buckets.page_size
        next_shape = self._buckets.decode_shape(rows, lookahead=lookahead, extra_rows=0)
        if next_shape.pages > shape.pages:
            self._programs.precompile(next_shape, sampling_features(rows))

    def _sample(self, sequences: list[Sequence | None], logits_BV: jax.Array, head_BC: jax.Array) -> None:
        features = sampling_features(sequences)
        sampled = self._runner.sample(logits_BV, head_BC, features)
        for sequence in sequences:
            if sequence is not None:
                sequence.num_scheduled += 1
        self._enqueue(PendingTokens(sequences, sampled, [1] * len(sequences)))

    def _enqueue(self, pending: PendingTokens) -> None:
        """Start the copy to the host as soon as the tokens are sampled, not when the host reads them."""
        for array in jax.tree.leaves(pending.sampled):
            array.copy_to_host_async()
        self._pending.append(pending)

    def _emit(self, pending: PendingTokens) -> None:
        """Wait for sampled tokens, and send them to the handles of their sequences."""
        sampled = jax.tree.map(np.asarray, pending.sampled)
        if sampled.token_B.ndim == 1:
            sampled = jax.tree.map(lambda array: array[None], sampled)
        tokens = sampled.token_B.T.tolist()
        finished: list[Sequence] = []
        for row, (sequence, count) in enumerate(zip(pending.sequences, pending.counts, strict=True)):
            if sequence is None or sequence.is_finished:
                continue
            top = sequence.request.logprobs
            logprobs = [] if top is None else [_token_logprob(sampled, (step, row), top) for step in range(count)]
            self._num_generated += sequence.append(
                tokens[row][:count], logprobs, tokenizer=self._tokenizer, eos=self._eos
            )
            if sequence.is_finished:
                finished.append(sequence)
        # Free slots after all deltas are sent: bookkeeping must not delay clients.
        for sequence in finished:
            self._scheduler.release(sequence)


def _token_logprob(sampled: SampledTokens, index: tuple[int, int], num_alternatives: int) -> TokenLogprob:
    """Return the log-probabilities of the token at (step, row)."""
    assert sampled.logprob_B is not None
    assert sampled.alternatives_BA is not None and sampled.alternative_logprobs_BA is not None
    tokens, logprobs = sampled.alternatives_BA[index], sampled.alternative_logprobs_BA[index]
    pairs = zip(tokens[:num_alternatives], logprobs[:num_alternatives], strict=True)
    alternatives = tuple((int(token), float(logprob)) for token, logprob in pairs)
    return TokenLogprob(int(sampled.token_B[index]), float(sampled.logprob_B[index]), alternatives)
