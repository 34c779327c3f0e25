"""Speed of the decode engine when all prompts are submitted at once."""

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
from maxhydra.config.schema.tasks.analysis import Load
from maxhydra.data import load_tokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import build_model, load_params
from maxhydra.decode.open_draft import open_draft_model
from maxhydra.decode.request import Delta, Request
from maxhydra.measure.record import BenchRecord, BenchTarget, explain_out_of_memory, peak_gib
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

# Upper bound of the warm-up calls until the set of compiled programs no longer changes.
MAX_WARMUP_CALLS = 50
HINT = "try smaller task.load.batches, shorter prompts or completions, quantization=int8_weights, or more devices"


def measure_decoding(target: BenchTarget, load: Load, engine: EngineConfig) -> Iterator[BenchRecord]:
    """One record per batch size, with these figures:

    - `tokens_per_second`: over the whole call;
    - `tokens_per_second_after_first`: over the tokens after the first of each sequence;
    - `tokens_per_second_steady`: while all sequences are running, from the last first token to the first end;
    - `first_token_s`: time until the last sequence has its first token;
    - `processor_s`: CPU time of the call, which depends little on the other load of the machine.
    """
    random = np.random.default_rng(target.config.run.seed)
    with explain_out_of_memory(HINT), closing(open_engine(target.config, load, engine)) as decode_engine:
        for batch in load.batches:
            prompts = random.integers(0, target.config.model.vocab_size, (batch, load.prompt))
            best = _best_of_repeats(decode_engine, prompts, load)
            sizes = {"batch": batch, "prompt": load.prompt, "new": load.new}
            peak = peak_gib()
            yield target.line("decode", **sizes, **best, peak_memory_gib=None if peak is None else round(peak, 2))


def open_engine(config: Config, load: Load, engine: EngineConfig) -> Engine:
    """An engine with capacity for the load, with the weights of the config or random ones."""
    decoder, sharder = build_model(config)
    params = (random_params if config.checkpoint.load_parameters is None else load_params)(config, decoder, sharder)
    max_batch, length = max(load.batches), load.prompt + load.new
    sizes = replace(engine, max_batch=max_batch, cache_tokens=2 * max_batch * length, max_context=length)
    draft_model, tokenizer = open_draft_model(config, sizes, sharder), load_tokenizer(config.data)
    return Engine(decoder, params, tokenizer, sizes, sharder=sharder, eos=(), draft_model=draft_model)


def random_params(config: Config, decoder: ModelDef, sharder: Sharder) -> Any:
    """Freshly initialized weights, in the storage format for decoding."""
    compute = jnp.dtype(config.model.dtypes.compute.value)
    init = jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(compute), decoder.base.init(key)),
        out_shardings=sharder.tree(decoder.base.axes),
    )
    return model.map_leaves(init(jax.random.key(config.run.seed)), partial(model.store_weight, decoder))


def _best_of_repeats(engine: Engine, prompts: np.ndarray, load: Load) -> dict[str, float]:
    """The best of each figure over the repeats, after the engine has compiled all programs that it uses.

    The engine compiles programs in the background and uses a larger one in the meantime, so the first calls differ.
    """
    programs = -1
    for _ in range(MAX_WARMUP_CALLS):
        decode_all(engine, prompts, new=load.new)
        if (count := engine.wait_for_compiles()) == programs:
            break
        programs = count
    runs = [decode_all(engine, prompts, new=load.new) for _ in range(load.repeats)]
    return {
        name: round(min(values) if name.endswith("_s") else max(values), 3)
        for name in runs[0]
        if (values := [run[name] for run in runs])
    }


def decode_all(engine: Engine, prompts: np.ndarray, *, new: int) -> dict[str, float]:
    """Submit all prompts at once, and record when tokens arrive."""
    request = Request(
        prompt=(0,), max_tokens=new, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0,
        stop=(), ignore_eos=True,
    )  # fmt: skip
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    finish_reasons: SimpleQueue[str] = SimpleQueue()

    def record(row: list[tuple[float, int]], delta: Delta) -> None:
        row.append((time.perf_counter(), len(delta.tokens)))
        if delta.finish is not None:
            finish_reasons.put(delta.error or delta.finish)

    requests = [replace(request, prompt=tuple(prompt)) for prompt in prompts.tolist()]
    start, cpu_start = time.perf_counter(), time.process_time()
    handles = engine.submit_all(requests)
    for handle, row in zip(handles, arrivals, strict=True):
        handle.listen(partial(record, row))
    if errors := {finish_reasons.get() for _ in prompts} - {"length"}:
        raise RuntimeError(f"the engine failed: {', '.join(sorted(errors))}")
    total = time.perf_counter() - start
    last_first_token, first_end = max(row[0][0] for row in arrivals), min(row[-1][0] for row in arrivals)
    steady = sum(count for row in arrivals for at, count in row if last_first_token < at <= first_end)
    has_steady_phase = first_end > last_first_token
    return {
        "tokens_per_second": len(prompts) * new / total,
        "tokens_per_second_after_first": len(prompts) * (new - 1) / (total - (last_first_token - start)),
        "tokens_per_second_steady": steady / (first_end - last_first_token) if has_steady_phase else 0.0,
        "first_token_s": last_first_token - start,
        "processor_s": time.process_time() - cpu_start,
    }
