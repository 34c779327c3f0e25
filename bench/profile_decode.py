"""Profiles decoding on a GPU: the kernels of a token. Prints a table, then one JSON line.

    python bench/profile_decode.py model=qwen3-30b-a3b model.num_layers=12 data=synthetic batch=1 prompt=64 new=64

The keys are those of bench/decode.py. The kernels are those of one call after warm-up, its prefill included, divided by
the number of tokens. Command buffers are on, as in decoding, so that kernels are known by their names alone.
"""

import collections
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
from arguments import split_arguments
from decode import TASK_KEYS
from profile_step import read_kernels
from target import open_target

from maxhydra.measure.decoding import decode_all, open_engine

WARM_UP, TOP = 3, 60


def main(arguments: list[str]) -> None:
    own, overrides = split_arguments(arguments, TASK_KEYS)
    load = [f"task.load.{TASK_KEYS[name]}={f'[{value}]' if name == 'batch' else value}" for name, value in own.items()]
    target, task = open_target(overrides, "task.what=[decode]", *load)
    prompts = np.random.default_rng(0).integers(
        0, target.config.model.vocab_size, (task.load.batches[0], task.load.prompt)
    )
    with closing(open_engine(target.config, task.load, task.engine)) as engine, tempfile.TemporaryDirectory() as folder:
        for _ in range(WARM_UP):
            decode_all(engine, prompts, new=task.load.new)
            engine.wait_for_compiles()
        with jax.profiler.trace(folder):
            figures = decode_all(engine, prompts, new=task.load.new)
        (path,) = Path(folder).rglob("*.xplane.pb")
        kernels = read_kernels(jax.profiler.ProfileData.from_file(str(path)))
    rows, span, busy = by_name(kernels)
    for name, (count, us) in sorted(rows.items(), key=lambda row: -row[1][1])[:TOP]:
        print(f"{us / task.load.new:9.2f} us {count / task.load.new:8.2f} x {us / count:8.2f} us  {name[:110]}")
    line = {"bench": "profile_decode", "overrides": overrides, **own, "launches": sum(c for c, _ in rows.values())}
    times = {"span_us": round(span / task.load.new, 1), "busy_us": round(busy / task.load.new, 1)}
    print(json.dumps({**line, **times, **{k: round(v, 3) for k, v in figures.items()}}), flush=True)


def by_name(kernels: list[tuple[str, str, int, int]]) -> tuple[dict[str, tuple[int, float]], float, float]:
    """Name -> launches and microseconds; the time from the first to the last kernel, and that in which one runs."""
    counts: collections.Counter[str] = collections.Counter()
    times: collections.defaultdict[str, float] = collections.defaultdict(float)
    busy, last = 0, 0
    for instruction, kernel, start, end in kernels:
        name = f"{kernel} [{instruction}]" if instruction and instruction != kernel else kernel
        counts[name] += 1
        times[name] += (end - start) / 1e3
        busy, last = busy + max(0, end - max(start, last)), max(end, last)
    span = max(end for *_, end in kernels) - min(start for _, _, start, _ in kernels)
    return {name: (counts[name], times[name]) for name in counts}, span / 1e3, busy / 1e3


if __name__ == "__main__":
    main(sys.argv[1:])
