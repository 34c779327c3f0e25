"""The engine's speed on this machine, with any overrides of the command line. One line of JSON per batch.

    python bench/decode.py model=smollm2-135m-instruct model.dtypes.compute=float32
    python bench/decode.py model=llama3.2-1b batch=1,8,64 prompt=64 new=64       # without weights: fresh ones

As bench/decode_peer.py measures transformers: all prompts are asked at once, `tokens_per_second` is over the whole
call, `tokens_per_second_after_first` over the tokens after each sequence's first, `tokens_per_second_steady` over the
time in which all sequences run, from the first token of the last to the end of the first, and `first_token_s` the time
until the first token of the last sequence; the best of `repeats`, after a warm-up in which programs are compiled, of
`warm` seconds where they are compiled while others run.
`processor_s` is the processor time of the call, which other work on the machine changes little.
"""

import json
import os
import queue
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra import model, runtime
from maxhydra.config.compose import compose
from maxhydra.config.decode import Engine as EngineConfig
from maxhydra.convert.load import load_weights
from maxhydra.data import tokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Delta, Request
from maxhydra.sharding import Sharder, build_mesh

OWN = {"batch": "1,8,32", "prompt": "64", "new": "64", "repeats": "3", "warm": "0"}


def open_engine(overrides: list[str], *, batch: int, length: int) -> tuple[Engine, int]:
    config = compose(overrides).config
    runtime.start(config.hardware)
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    decoder = model.build(config.model, quantization=config.quantization)
    shardings, compute = sharder.tree(decoder.base.axes), jnp.dtype(config.model.dtypes.compute.value)
    if config.checkpoint.load_parameters is None:
        made = jax.jit(
            lambda key: jax.tree.map(lambda x: x.astype(compute), decoder.base.init(key)), out_shardings=shardings
        )
        params = model.mapped(made(jax.random.key(0)), partial(model.kept, decoder))
    else:
        params = load_weights(config.checkpoint.load_parameters, decoder, shardings=shardings, dtype=compute)
    sizes = EngineConfig(
        max_batch=batch, cache_tokens=2 * batch * length, max_context=length, prefill_chunk=4096, prefix_cache=False
    )
    return Engine(decoder, params, tokenizer(config.data), sizes, sharder=sharder, eos=()), config.model.vocab_size


def measure(engine: Engine, prompts: np.ndarray, *, new: int) -> dict[str, float]:
    """Ask all prompts at once and note when tokens come."""
    request = Request(
        prompt=(0,), max_tokens=new, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0,
        stop=(), ignore_eos=True,
    )  # fmt: skip
    came: list[list[tuple[float, int]]] = [[] for _ in prompts]

    finishes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def note(row: list[tuple[float, int]], delta: Delta) -> None:
        row.append((time.perf_counter(), len(delta.tokens)))
        if delta.finish is not None:
            finishes.put(delta.error or delta.finish)

    began, used = time.perf_counter(), time.process_time()
    handles = engine.submit_all(replace(request, prompt=tuple(map(int, prompt))) for prompt in prompts)
    for handle, row in zip(handles, came, strict=True):
        handle.listen(partial(note, row))
    assert {finishes.get() for _ in prompts} == {"length"}
    all_run, first_ends = max(row[0][0] for row in came), min(row[-1][0] for row in came)
    steady = sum(count for row in came for at, count in row if all_run < at <= first_ends)
    whole, until_first = time.perf_counter() - began, all_run - began
    return {
        "tokens_per_second": len(prompts) * new / whole,
        "tokens_per_second_after_first": len(prompts) * (new - 1) / (whole - until_first),
        "tokens_per_second_steady": steady / (first_ends - all_run) if first_ends > all_run else 0.0,
        "first_token_s": until_first,
        "processor_s": time.process_time() - used,
    }


def main(arguments: list[str]) -> None:
    own = OWN | dict(part.split("=", 1) for part in arguments if part.split("=")[0] in OWN)
    overrides = [part for part in arguments if part.split("=")[0] not in OWN]
    batches, length, new = [int(n) for n in own["batch"].split(",")], int(own["prompt"]), int(own["new"])
    engine, vocabulary = open_engine(overrides, batch=max(batches), length=length + new)
    rng = np.random.default_rng(0)
    for batch in batches:
        prompts = rng.integers(0, vocabulary, (batch, length))
        began = time.perf_counter()
        for number in count():
            measure(engine, prompts, new=new)
            if number and time.perf_counter() - began > float(own["warm"]):
                break
        runs = [measure(engine, prompts, new=new) for _ in range(int(own["repeats"]))]
        best = {
            name: round(min(values) if name.endswith("_s") else max(values), 3)
            for name in runs[0]
            if (values := [run[name] for run in runs])
        }
        line = {"bench": "decode", "overrides": overrides, "device": jax.devices()[0].device_kind, "batch": batch}
        print(json.dumps({**line, "prompt": length, "new": new, **best, "load": os.getloadavg()[0]}), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
