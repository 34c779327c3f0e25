"""Speed of the decode engine: all prompts are asked at once."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra import model
from maxhydra.config import Config
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.tasks.bench import Load
from maxhydra.data import tokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import loaded, plan_weights
from maxhydra.decode.request import Delta, Request
from maxhydra.measure.memory import memory_explained, peak_gib
from maxhydra.measure.record import BenchRecord, BenchTarget
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

# Before the programs of a load are taken to be what they will be.
MOST_CALLS = 50
WAY_OUT = "try smaller task.load.batches, shorter prompts and answers, quantization=int8_weights, or more devices"


def measure_decoding(subject: BenchTarget, load: Load, engine: EngineConfig) -> Iterator[BenchRecord]:
    """A line for each number of prompts.

    `tokens_per_second` is over the whole call, `tokens_per_second_after_first` over the tokens after each sequence's
    first, `tokens_per_second_steady` over the time in which all sequences run, from the first token of the last to the
    end of the first, `first_token_s` the time until the first token of the last sequence, `processor_s` the processor
    time of the call, which other work on the machine changes little.
    """
    random = np.random.default_rng(subject.config.run.seed)
    with memory_explained(WAY_OUT), closing(open_engine(subject.config, load, engine)) as opened:
        for batch in load.batches:
            prompts = random.integers(0, subject.config.model.vocab_size, (batch, load.prompt))
            best = _best(opened, prompts, load)
            sizes = {"batch": batch, "prompt": load.prompt, "new": load.new}
            peak = peak_gib()
            yield subject.line("decode", **sizes, **best, peak_memory_gib=None if peak is None else round(peak, 2))


def open_engine(config: Config, load: Load, engine: EngineConfig) -> Engine:
    """The engine with room for the load, around weights of the config or fresh ones."""
    decoder, sharder = plan_weights(config)
    params = (_fresh if config.checkpoint.load_parameters is None else loaded)(config, decoder, sharder)
    most, length = max(load.batches), load.prompt + load.new
    sizes = replace(engine, max_batch=most, cache_tokens=2 * most * length, max_context=length)
    return Engine(decoder, params, tokenizer(config.data), sizes, sharder=sharder, eos=())


def _fresh(config: Config, decoder: ModelDef, sharder: Sharder) -> Any:
    """Weights as training begins with them, kept as they would be for decoding."""
    compute = jnp.dtype(config.model.dtypes.compute.value)
    made = jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(compute), decoder.base.init(key)),
        out_shardings=sharder.tree(decoder.base.axes),
    )
    return model.mapped(made(jax.random.key(config.run.seed)), partial(model.kept, decoder))


def _best(engine: Engine, prompts: np.ndarray, load: Load) -> dict[str, float]:
    """The best of each number over the repeats, once a call had all the programs that it needs: they are compiled while
    others do their work, and another takes their place until it has been seen that they pay."""
    before = -1
    for _ in range(MOST_CALLS):
        ask_all(engine, prompts, new=load.new)
        if (now := engine.settled()) == before:
            break
        before = now
    runs = [ask_all(engine, prompts, new=load.new) for _ in range(load.repeats)]
    return {
        name: round(min(values) if name.endswith("_s") else max(values), 3)
        for name in runs[0]
        if (values := [run[name] for run in runs])
    }


def ask_all(engine: Engine, prompts: np.ndarray, *, new: int) -> dict[str, float]:
    """Ask all prompts at once, and note when tokens come."""
    request = Request(
        prompt=(0,), max_tokens=new, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0,
        stop=(), ignore_eos=True,
    )  # fmt: skip
    came: list[list[tuple[float, int]]] = [[] for _ in prompts]
    endings: SimpleQueue[str] = SimpleQueue()

    def note(row: list[tuple[float, int]], delta: Delta) -> None:
        row.append((time.perf_counter(), len(delta.tokens)))
        if delta.finish is not None:
            endings.put(delta.error or delta.finish)

    requests = [replace(request, prompt=tuple(prompt)) for prompt in prompts.tolist()]
    began, used = time.perf_counter(), time.process_time()
    handles = engine.submit_all(requests)
    for handle, row in zip(handles, came, strict=True):
        handle.listen(partial(note, row))
    if faults := {endings.get() for _ in prompts} - {"length"}:
        raise RuntimeError(f"the engine failed: {', '.join(sorted(faults))}")
    whole = time.perf_counter() - began
    all_run, first_ends = max(row[0][0] for row in came), min(row[-1][0] for row in came)
    steady = sum(count for row in came for at, count in row if all_run < at <= first_ends)
    return {
        "tokens_per_second": len(prompts) * new / whole,
        "tokens_per_second_after_first": len(prompts) * (new - 1) / (whole - (all_run - began)),
        "tokens_per_second_steady": steady / (first_ends - all_run) if first_ends > all_run else 0.0,
        "first_token_s": all_run - began,
        "processor_s": time.process_time() - used,
    }
