"""The decode engine: one thread that prefills prompts, decodes many sequences together and emits their tokens.

The device runs one iteration ahead of the host. An iteration dispatches a prefill call for waiting prompts, then a
decode step of all running sequences, and only then reads the tokens of the previous iteration. A sequence that turns
out to be finished has by then sampled one token too many, which is dropped; the cache pages that this token wrote are
overwritten before anyone reads them.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as List
from concurrent.futures import as_completed
from functools import partial
from typing import Any

import jax
import numpy as np

from maxhydra.config.schema.decode import Engine as Config
from maxhydra.config.schema.decode import Pooling
from maxhydra.config.schema.run import Progress
from maxhydra.data import Tokenizer
from maxhydra.decode.adapters import AdapterLimits, AdapterTable
from maxhydra.decode.audio_limits import AudioLimits
from maxhydra.decode.draft_model import DraftModel
from maxhydra.decode.emission import Emitter
from maxhydra.decode.grammar import GrammarCompiler
from maxhydra.decode.image_limits import ImageLimits
from maxhydra.decode.inbox import Inbox
from maxhydra.decode.request import Handle, LoadedAdapter, Request, RequestRejectedError
from maxhydra.decode.runner import Runner
from maxhydra.decode.sampler import MAX_LOGPROBS
from maxhydra.decode.scheduler import PrefillChunk, Scheduler
from maxhydra.decode.sequence import Sequence, find_problem
from maxhydra.decode.step_inputs import StepShape, sampling_features
from maxhydra.decode.transfer import Transfer
from maxhydra.model import ModelDef
from maxhydra.runtime import peers
from maxhydra.runtime.profiler import Profiler
from maxhydra.runtime.progress import open_item_progress
from maxhydra.sharding import Sharder

Tree = Any
# Pages before the end of the current context bucket at which the next bucket is compiled.
PRECOMPILE_PAGES = 2


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
        prefill_sharder: Sharder | None = None,
        profiler: Profiler | None = None,
        version: int = 0,
        records_experts: bool = False,
        adapters: AdapterLimits | None = None,
        draft_model: DraftModel | None = None,
    ):
        """`eos`: token ids that end a completion. `prefill_sharder`: of separate devices that prefill prompts; None if
        all devices do both. `profiler`: profiles iterations, counted from 1. `version`: of the weights; see
        `update_params`. `records_experts`: completions contain the experts of their tokens, and prompts are not taken
        from a prefix cache. `adapters`: of the adapters that requests may name; None: requests have no adapter.
        `draft_model`: on the mesh of `sharder`, with speculation.method=model."""
        self._adapters, self._adapter_lock = AdapterTable(adapters.slots if adapters else 0), threading.Lock()
        self._profiler = profiler
        self._vocab_size, self._max_batch = model.config.vocab_size, config.max_batch
        self._max_context = config.max_context or model.config.context_length
        prefix_cache = not model.config.is_recurrent if config.prefix_cache is None else config.prefix_cache
        make_runner = functools.partial(Runner, model, params, config, adapters=adapters)
        self._runner = self._prefill_runner = make_runner(
            sharder=sharder,
            prefix_cache=prefix_cache and prefill_sharder is None and not records_experts,
            records_experts=records_experts,
            draft_model=draft_model,
        )
        self._runner.version = version
        self._runners = [self._runner]
        self._transfer: Transfer | None = None
        if prefill_sharder is not None:
            self._prefill_runner = make_runner(sharder=prefill_sharder, prefix_cache=prefix_cache)
            self._runners.append(self._prefill_runner)
            self._transfer = Transfer(self._prefill_runner, self._runner)
        self._programs = self._runner.programs
        buckets, capacities = self._prefill_runner.buckets, (self._runner.capacity, self._prefill_runner.capacity)
        chunk, round_tokens = buckets.prefill_chunk, buckets.round_tokens
        self._scheduler = Scheduler(*capacities, prefill_chunk=chunk, round_tokens=round_tokens)
        upload = self._runner.upload
        self._grammars = GrammarCompiler(tokenizer, eos=eos, vocab_size=self._vocab_size, upload=upload)
        policy = self._runner.mask_policy
        self._emitter = Emitter(self._scheduler, self._grammars, policy, tokenizer, eos=frozenset(eos))
        self._num_prefilled = 0

        self._inbox = Inbox(self._make_sequence)
        self._images = ImageLimits(model.config, chunk, config.cache_dtype)
        self._audio = AudioLimits(model.config, chunk)
        self._failure = ""
        if config.warm_up:
            _compile_all(self._runner, self._prefill_runner)
            if self._transfer is not None:
                self._transfer.warm_up()
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)
        self._thread.start()

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
        self._reject_if(self._images.find_problem(request))
        self._reject_if(self._audio.find_problem(request))
        self._reject_if(self._inbox.find_problem(request))
        length, limit = len(request.prompt), self._max_context
        if length >= limit:
            self._reject_if(
                f"the prompt has {length} tokens, but prompt and completion together may have at most {limit}: "
                "shorten it, or raise task.engine.max_context"
            )
        adapter = None if request.adapter is None else self._adapters.use(request.adapter)
        sequence = Sequence(request, budget=min(request.max_tokens, limit - length), adapter=adapter)
        sequence.position_lag = self._images.position_lag(request)
        if adapter is not None:
            self._adapters.add_user(adapter, sequence)
        remedy = f"or lower max_tokens={request.max_tokens}"
        self._reject_if(self._runner.capacity.find_problem(sequence.cache_tokens, remedy))
        self._reject_if(self._prefill_runner.capacity.find_problem(length, "or shorten the prompt"))
        if request.grammar:
            sequence.constraint = self._grammars.constrain(request.grammar)
        return sequence

    def add_flush(self, flush: Callable[[], None]) -> None:
        """Call `flush` in the engine's thread after the deltas of each call, so that listeners send them together."""
        self._emitter.flushes.append(flush)

    def stats(self) -> dict[str, float]:
        """Return counts of running and waiting sequences, used and cached pages, generated and prefilled tokens.

        Of tokens that were sampled without the mask of a grammar, how many it accepted and rejected.
        With speculative decoding also of decode steps, those of them with drafts, drafted and accepted tokens.
        """
        scheduler, emitter, speculation = self._scheduler, self._emitter, self._runner.draft_steps or {}
        if speculation:
            speculation |= {"tokens_drafted": emitter.num_drafted, "tokens_accepted": emitter.num_accepted}
        return {
            "running": len(scheduler.running) + len(scheduler.arriving) + len(scheduler.prefilling),
            "waiting": len(scheduler.waiting) + self._inbox.num_submitted,
            "pages": scheduler.capacity.num_pages,
            "pages_used": scheduler.capacity.num_used,
            "pages_kept": scheduler.capacity.num_cached,
            "tokens_written": self._emitter.num_tokens,
            "prompt_tokens_read": self._num_prefilled,
            "grammar_tokens_accepted": emitter.num_allowed,
            "grammar_tokens_rejected": emitter.num_rejected,
            "programs_compiled": sum(runner.programs.num_programs for runner in self._runners),
            **speculation,
        }

    def update_params(self, params: Tree, version: int = 0) -> None:
        """Replace the weights by others of the same shapes, from the next step on.

        The prefix cache is cleared; running sequences continue on their existing KV cache. Log-probabilities of tokens
        carry the `version` of the weights that sampled them.
        """
        self._inbox.barrier(
            [partial(runner.set_params, runner.prepare_params(params), version) for runner in self._runners]
        )

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """The loaded adapters by name."""
        return self._adapters.loaded

    def load_adapter(self, name: str, location: str, weights: Tree) -> None:
        """Make an adapter available to requests; AdapterError if no slot is free, or the name is taken.

        `weights`: as `AdapterReader.read` returns them. Running sequences continue. A collective call.
        """
        with self._adapter_lock:
            adapter = self._adapters.reserve(name, location)
            self._inbox.barrier(
                [partial(runner.set_adapters, runner.replaced(adapter.slot, weights)) for runner in self._runners]
            )
            self._adapters.add(adapter)

    def unload_adapter(self, name: str) -> None:
        """Make an adapter unavailable to new requests; its running sequences finish with it."""
        self._adapters.remove(name)

    def pool(self, rows: List[List[int]], pooling: Pooling) -> np.ndarray:
        """Pooled hidden states [N, D] of token sequences, of length 1; of a reward model, scores [N, 1]."""
        return self._runner.pool(rows, pooling, call=self._inbox.call)

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
        return sum(runner.programs.wait_for_compiles() for runner in self._runners)

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
            with peers.naming_lost_processes():
                self._iterate()
        except Exception as error:
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            submitted = self._inbox.end(self._failure or "the engine is closed")
            for sequence in [*self._scheduler.sequences(), *submitted]:
                if self._failure:
                    sequence.fail(self._failure)
                else:
                    sequence.cancel()
            self._emitter.flush()
            self._emitter.close()
            for runner in self._runners:
                runner.programs.close()

    def _iterate(self) -> None:
        for number in itertools.count(1):
            if not self._admit():
                break
            profiler = self._profiler
            with profiler.profile_iteration(number, self._wait) if profiler else contextlib.nullcontext():
                self._step()

    def _wait(self) -> None:
        for runner in self._runners:
            runner.wait()

    def _admit(self) -> bool:
        """Wait for work, then queue new sequences and swap in new weights; return False if closing."""
        is_busy = not (self._emitter.is_idle and self._scheduler.is_idle)
        turn = self._inbox.take(is_busy=is_busy, admitted=self._scheduler.sequences)
        for sequence in turn.sequences:
            self._scheduler.add(sequence)
        for update in turn.updates:
            update()
        self._scheduler.drop(turn.cancelled)
        if turn.cancelled:
            self._emitter.flush()
        return not turn.is_last

    def _step(self) -> None:
        """Dispatch one prefill call and one decode call, then emit the tokens of the previous iteration."""
        self._receive()
        self._emitter.start_iteration()
        # As many prefill calls as decode steps, so that free slots are soon in use.
        for _ in range(self._runner.multi_steps):
            if not self._prefill():
                break
        self._decode()
        self._emitter.end_iteration()

    def _receive(self) -> None:
        """Let the sequences run that have arrived from separate prefill devices; wait for one if no other runs."""
        while self._transfer is not None:
            received = self._transfer.receive(wait=self._emitter.is_idle and not self._scheduler.next_rows())
            if received is None:
                break
            first_tokens, sequences = received
            for sequence in sequences:
                self._scheduler.mark_arrived(sequence)
            if first_tokens is not None:
                self._emitter.add(first_tokens)

    def _prefill(self) -> bool:
        """Dispatch prompt chunks; a prompt that is complete with its chunk gets its first token sampled."""
        if self._transfer is not None and self._transfer.is_full:
            return False
        chunks = self._scheduler.next_chunks()
        self._scheduler.mark_prefilled(chunks)
        for call in self._prefill_runner.buckets.split_prefill(chunks) if chunks else ():
            self._prefill_chunks(call)
        return bool(chunks)

    def _prefill_chunks(self, chunks: List[PrefillChunk]) -> None:
        if self._runner.decodes_single_steps and (rows := self._scheduler.next_rows()):
            self._programs.precompile(self._decode_shape(rows), sampling_features(rows))
        self._num_prefilled += sum(chunk.length for chunk in chunks)
        output = self._prefill_runner.prefill(chunks)
        if self._transfer is not None:
            self._transfer.start(output)
        elif output.first_tokens is not None:
            self._emitter.add(output.first_tokens)

    def _decode(self) -> None:
        """Dispatch a decode step of every running sequence, or a multi-step call."""
        rows = self._next_rows()
        if not rows:
            return
        pending = self._runner.decode_multi(rows)
        if pending is None and (self._emitter.is_verifying or any(sequence.num_uncertain for sequence in rows)):
            # The next single step begins where calls end whose tokens are verified, which is known once they are read.
            self._emitter.emit_all()
            rows = self._next_rows()
        if pending is None and rows:
            shape = self._decode_shape(rows)
            self._precompile(rows, shape)
            pending = self._runner.decode(rows, shape, self._next_masks)
        if pending is not None:
            self._emitter.add(pending)

    def _next_rows(self) -> list[Sequence]:
        """Return the running sequences that still need tokens, after sampling rejected ones again."""
        resampled = self._runner.resample(self._scheduler.next_rows())
        for pending in resampled:
            self._emitter.add(pending)
        return self._scheduler.next_rows()

    def _next_masks(self, rows: list[Sequence | None]) -> np.ndarray | jax.Array:
        """Read all tokens, on which these masks depend."""
        self._emitter.read_all()
        return self._grammars.masks(
            [None if sequence is None or sequence.is_finished else sequence.constraint for sequence in rows]
        )

    def _decode_shape(self, rows: list[Sequence]) -> StepShape:
        """Return the bucket for decoding these rows; while others are about to join, preferably one for all."""
        num_joining = len(self._scheduler.waiting) + len(self._scheduler.prefilling)
        extra_rows = min(num_joining, self._max_batch - len(rows))
        needed = self._runner.buckets.decode_shape(rows, lookahead=0, extra_rows=0)
        eventual = self._runner.buckets.decode_shape(rows, lookahead=0, extra_rows=extra_rows)
        return self._programs.choose_shape(needed, eventual=eventual)

    def _precompile(self, rows: list[Sequence], shape: StepShape) -> None:
        """Compile the next context bucket before it is needed."""
        lookahead = PRECOMPILE_PAGES * self._runner.buckets.page_size
        next_shape = self._runner.buckets.decode_shape(rows, lookahead=lookahead, extra_rows=0)
        if next_shape.pages > shape.pages:
            self._programs.precompile(next_shape, sampling_features(rows))


def _compile_all(decoder: Runner, prefiller: Runner) -> None:
    """Compile a program for every batch, with a progress bar; the two runners may be the same one."""
    runners = {id(runner): runner for runner in (decoder, prefiller)}.values()
    futures = [
        future
        for runner in runners
        for future in runner.warm_up(is_prefilling=runner is prefiller, is_decoding=runner is decoder)
    ]
    with open_item_progress(Progress.auto, total=len(futures), start=0, verb="compiled") as progress:
        for completed, future in enumerate(as_completed(futures), 1):
            future.result()
            progress.update(completed, 0)
