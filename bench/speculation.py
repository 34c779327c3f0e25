"""Measures speculative decoding against plain decoding. One JSON line per text and batch size.

    python bench/speculation.py model=smollm2-135m-instruct model.dtypes.compute=float32 batch=1,8
    python bench/speculation.py model=llama3.2-1b batch=1,8,64 prompt=512 new=512 tokens=4    # on a GPU
    python bench/speculation.py model=smollm2-135m-instruct model.mtp.depth=1 method=mtp batch=1,8
    python bench/speculation.py model=llama3.1-8b method=model draft=llama3.2-1b batch=1,8,64

`draft`: model option of the draft model. All weights are random, except that layers add nothing to the residual stream
and the head is the embedding: a token is most likely repeated, and MTP layers and draft models predict that. They cost
as much as any others. Three texts, of which a draft model drafts every token, since it samples with the same seeds:

- repeating: greedy, so that every drafted token is accepted;
- random: tokens sampled uniformly from the vocabulary, in which no n-gram occurs twice and nothing can be drafted, and
  no draft of an MTP layer is accepted;
- misleading: tokens sampled uniformly from eight: n-grams can be drafted in every step, and one in eight is accepted.

`ratio` is the throughput with speculative decoding over that without. Best of `repeats`, after warm-up calls until one
of them compiles nothing. `speculative_steps` is the part of the decode steps that verified drafts.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arguments import split_arguments
from target import open_target

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import Speculation, SpeculationMethod
from maxhydra.config.schema.tasks.analysis import BenchTask
from maxhydra.data import load_tokenizer
from maxhydra.decode.draft_model import DraftModel
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import build_model
from maxhydra.decode.request import Request
from maxhydra.measure.decoding import MAX_WARMUP_CALLS, random_params
from maxhydra.measure.record import BenchTarget

SIZES = {"batch": "1,8", "prompt": "64", "new": "128", "repeats": "3"}
DEFAULTS = {**SIZES, "method": "ngram", "tokens": "4", "min_ngram": "2", "draft": ""}
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# A temperature that makes all tokens equally likely, and a bias that leaves only some: 50 after the division.
HOT, LARGE = {**GREEDY, "temperature": 1e6}, 5e7
TEXTS: dict[str, dict[str, Any]] = {
    "repeating": GREEDY,
    "random": HOT,
    "misleading": {**HOT, "logit_bias": tuple((token, LARGE) for token in range(8))},
}


def repeating_weights(params: dict[str, Any]) -> dict[str, Any]:
    """The weights with zeros in the output projections of all layers, and the embedding as the head."""

    def zero(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        is_output = any(getattr(key, "key", None) in ("out", "down") for key in path)
        return jnp.zeros_like(leaf) if is_output else leaf

    params = jax.tree_util.tree_map_with_path(zero, params)
    if "head" in params:
        params["head"]["kernel"] = params["embedding"]["table"].T.astype(params["head"]["kernel"].dtype)
    for layer in params.get("mtp", {}).values():
        # The embedding of the next token, without the hidden state.
        layer["join"]["kernel"] = jnp.eye(*layer["join"]["kernel"].shape, dtype=layer["join"]["kernel"].dtype)
    return params


def open_engine(target: BenchTarget, task: BenchTask, own: dict[str, str], *, is_speculative: bool) -> Engine:
    """An engine with capacity for the largest batch."""
    model, sharder = build_model(target.config)
    params = repeating_weights(random_params(target.config, model, sharder))
    max_batch, length = max(map(int, own["batch"].split(","))), int(own["prompt"]) + int(own["new"])
    method, draft_model = SpeculationMethod(own["method"]) if is_speculative else None, None
    speculation = Speculation(method=method, tokens=int(own["tokens"]), min_ngram=int(own["min_ngram"]))
    if method is SpeculationMethod.model:
        draft = compose([f"model={own['draft']}", f"model.dtypes.compute={target.config.model.dtypes.compute.value}"])
        decoder, _ = build_model(draft.config)
        weights = repeating_weights(random_params(draft.config, decoder, sharder))
        draft_model = DraftModel(decoder, weights)
    sizes = {"max_batch": max_batch, "cache_tokens": 2 * max_batch * length, "max_context": length}
    settings = dataclasses.replace(task.engine, **sizes, speculation=speculation, prefix_cache=False)
    tokenizer = load_tokenizer(target.config.data)
    return Engine(model, params, tokenizer, settings, sharder=sharder, eos=(), draft_model=draft_model)


def measure(engines: tuple[Engine, Engine], requests: list[Request], *, repeats: int) -> dict[str, float]:
    """Tokens per second of both engines, and drafts and speculative steps of the second one.

    They take turns, so that other load of the machine affects both.
    """
    for engine in engines:
        programs = -1
        for _ in range(MAX_WARMUP_CALLS):
            complete(engine, requests)
            if (count := engine.wait_for_compiles()) == programs:
                break
            programs = count
    before = engines[1].stats()
    seconds = [[complete(engine, requests) for engine in engines] for _ in range(repeats)]
    after, generated = engines[1].stats(), sum(request.max_tokens for request in requests)
    plain, speculative = (generated / min(column) for column in zip(*seconds, strict=True))
    speeds = {"plain": round(plain, 1), "speculative": round(speculative, 1), "ratio": round(speculative / plain, 2)}
    new = {name: after[name] - before[name] for name in after}
    shares = {f"{name}_per_token": new[name] / (repeats * generated) for name in ("tokens_drafted", "tokens_accepted")}
    shares["speculative_steps"] = new["steps_speculative"] / new["steps"]
    return speeds | {name: round(value, 3) for name, value in shares.items()}


def complete(engine: Engine, requests: list[Request]) -> float:
    """Seconds for all requests, submitted at once."""
    start = time.perf_counter()
    for handle in engine.submit_all(requests):
        if error := handle.result().error:
            raise RuntimeError(f"the engine failed: {error}")
    return time.perf_counter() - start


def requests_of(text: str, batch: int, own: dict[str, str], vocab_size: int) -> list[Request]:
    """Requests with different random prompts."""
    prompts = np.random.default_rng(0).integers(0, vocab_size, (batch, int(own["prompt"])))
    common = {**TEXTS[text], "max_tokens": int(own["new"]), "stop": (), "ignore_eos": True, "stream": False}
    return [Request(prompt=tuple(prompt), seed=number, **common) for number, prompt in enumerate(prompts.tolist())]


def lines(target: BenchTarget, task: BenchTask, own: dict[str, str]) -> Iterator[dict[str, Any]]:
    """One line per text and batch size."""
    sizes, vocab_size = {name: int(own[name]) for name in ("prompt", "new", "tokens")}, target.config.model.vocab_size
    drafts = {"method": own["method"], **({"draft": own["draft"]} if own["draft"] else {})}
    with (
        closing(open_engine(target, task, own, is_speculative=False)) as plain,
        closing(open_engine(target, task, own, is_speculative=True)) as speculative,
    ):
        for text in TEXTS:
            for batch in map(int, own["batch"].split(",")):
                requests = requests_of(text, batch, own, vocab_size)
                found = measure((plain, speculative), requests, repeats=int(own["repeats"]))
                yield target.line("speculation", **drafts, text=text, batch=batch, **sizes, **found)


def main(arguments: list[str]) -> None:
    given, overrides = split_arguments(arguments, DEFAULTS)
    target, task = open_target(overrides, "task.what=[decode]")
    for line in lines(target, task, {**DEFAULTS, **given}):
        print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
