"""Decoding of block diffusion models: one sequence at a time, block by block, with a cache of the finished blocks."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.objective import DIFFUSION_SAMPLING
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.data import Tokenizer
from maxhydra.decode.detokenize import Detokenizer, StopMatcher
from maxhydra.decode.open import build_model, load_params
from maxhydra.decode.request import Delta, Handle, Request, RequestRejectedError
from maxhydra.decode.sampling_params import PromptEncoder, make_requests
from maxhydra.model.block_decoder import BlockDecoder

(DEFAULTS,) = make_requests((), Sampling(), samples=1, seed=0, number=0, logprobs=None)  # type: ignore[call-arg]


def open_diffusion_engine(config: Config, task: DecodeTask, prompts: PromptEncoder) -> "DiffusionEngine":
    """Load the weights and start the engine."""
    if jax.process_count() > 1:
        reason = "is not supported by task=decode with several processes"
        raise ConfigError(Problem("model.diffusion.block_size", reason, accepted="null, or a single process"))
    model, sharder = build_model(config)
    blocks = BlockDecoder(model, load_params(config, model, sharder), sharder, task.denoise_steps)
    context = task.engine.max_context or config.model.context_length
    return DiffusionEngine(blocks, prompts.tokenizer, eos=prompts.eos_ids, max_context=context)


class DiffusionEngine:
    """The interface of the engine for block diffusion models; a thread decodes the requests in order."""

    def __init__(self, blocks: BlockDecoder, tokenizer: Tokenizer, *, eos: frozenset[int], max_context: int):
        self._blocks, self._tokenizer, self._eos, self._max_context = blocks, tokenizer, eos, max_context
        self._pool = ThreadPoolExecutor(1)
        self._num_tokens = 0
        self._is_closed = False

    def submit(self, request: Request) -> Handle:
        """Queue a request; raise RequestRejectedError if it can never be served."""
        self._check(request)
        handle = Handle()
        self._pool.submit(self._decode, request, handle)
        return handle

    def stats(self) -> dict[str, float]:
        return {"generated_tokens": self._num_tokens}

    def close(self) -> None:
        """Stop the thread after the current block; unfinished sequences end with finish="cancelled"."""
        self._is_closed = True
        self._pool.shutdown()

    def _check(self, request: Request) -> None:
        accepted = {"prompt", *DIFFUSION_SAMPLING}
        for field in dataclasses.fields(Request):
            name, value = field.name, getattr(request, field.name)
            if name not in accepted and value is not None and value != getattr(DEFAULTS, name):
                raise RequestRejectedError(f"{name}={value} is not supported with model.diffusion.block_size")
        if self._blocks.mask_token in request.prompt:
            raise RequestRejectedError("the prompt contains the token model.diffusion.mask_token")
        if len(request.prompt) >= self._max_context:
            reason = f"the prompt has {len(request.prompt)} tokens, and task.engine.max_context={self._max_context}"
            raise RequestRejectedError(f"{reason}: shorten it, or raise task.engine.max_context")

    def _decode(self, request: Request, handle: Handle) -> None:
        """Deliver the completion block by block."""
        try:
            for delta in self._deltas(request, handle):
                handle.put(delta)
        except Exception as error:  # Whoever waits for the handle must learn of it.
            handle.put(Delta("", (), finish="error", error=f"{type(error).__name__}: {error}"))

    def _deltas(self, request: Request, handle: Handle) -> Iterator[Delta]:
        text_of, stops = Detokenizer(self._tokenizer, request.prompt), StopMatcher(request.stop)
        length, count = min(len(request.prompt) + request.max_tokens, self._max_context), len(request.prompt)
        blocks = partial(self._blocks.blocks, temperature=request.temperature, seed=request.seed)
        for block in blocks(request.prompt, length):
            if self._is_closed or handle.is_cancelled:
                yield Delta("", (), finish="cancelled")
                return
            tokens = block[: length - count]
            is_end = [token in self._eos and not request.ignore_eos for token in tokens]
            tokens = tokens[: is_end.index(True) + 1] if any(is_end) else tokens
            count += len(tokens)
            self._num_tokens += len(tokens)
            text = stops.add(text_of.add(tokens))
            is_last = any(is_end) or stops.is_stopped or count >= length
            if is_last and not stops.is_stopped:
                text += stops.add(text_of.flush())
                text += stops.flush()
            finish = "stop" if any(is_end) or stops.is_stopped else "length"
            yield Delta(text, tuple(tokens), finish=finish if is_last else None)
            if is_last:
                return
