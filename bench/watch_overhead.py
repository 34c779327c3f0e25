"""Cost of all that observes a run: statistics of layers, watchdog, machine curves, profiler hooks. One JSON line.

python bench/watch_overhead.py [--rounds 30] [--steps 50] [OVERRIDE ...]

Blocks of steps with and without them alternate in one process. A block has one step with statistics (statistics.every =
--steps). `ratio` is the median of the ratios of neighbouring blocks, `cpu_ratio` that of their CPU times, for machines
on which other processes change the time of a step by more than 1 %. `statistics_ratio` is the time of the step with
statistics by that of the usual one, and `hooks_us` the time of all hooks of one step.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import jax

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.measure.training import prepare
from maxhydra.record import MetricsWriter
from maxhydra.runtime.profiler import Profiler
from maxhydra.runtime.usage import UsageSampler
from maxhydra.runtime.watchdog import Watchdog
from maxhydra.train.compile import compile_step
from maxhydra.train.statistics import StatisticsLogger

CALLS = 20_000

Times: TypeAlias = tuple[float, float]


def summarize(pairs: Sequence[tuple[Times, Times]], single: Sequence[Times], hooks: float) -> dict[str, float]:
    """`pairs`: time and CPU time per step of neighbouring blocks with and without all that observes them.

    `single`: CPU times of the step with statistics, and of a usual one; `hooks`: seconds of all hooks of one step.
    """
    step_s = statistics.median(bare for _, (bare, _) in pairs)
    return {
        "step_ms": round(1e3 * step_s, 3),
        "ratio": round(statistics.median(on / off for (on, _), (off, _) in pairs), 4),
        "cpu_ratio": round(statistics.median(on / off for (_, on), (_, off) in pairs), 4),
        "statistics_ratio": round(statistics.median(on / off for on, off in single), 3),
        "hooks_us": round(1e6 * hooks, 2),
        "hooks_share": round(hooks / step_s, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("overrides", nargs="*", default=["model=micro"])
    args = parser.parse_args()
    config = compose(args.overrides).config
    compiled = prepare(config, runtime.start(config.hardware))
    training, loader, folder = compiled.training, compiled.loader, Path(tempfile.mkdtemp())
    state = training.states.create(0)
    recording, _ = compile_step(training.states, training.loss, config.train, loader.peek(), has_statistics=True)
    watchdog, profiler = Watchdog(config.watchdog, folder), Profiler(config.profile, folder)
    logger = StatisticsLogger(args.steps, recording, lambda: MetricsWriter(folder / "statistics.jsonl"), config.model)
    usage = UsageSampler(config.statistics.system_seconds)
    watchdog.start(0)

    def plain(step: int) -> jax.Array:
        nonlocal state
        state, metrics = compiled.step(state, next(loader))
        return metrics["loss"]

    def observed(step: int) -> jax.Array:
        nonlocal state
        profiler.is_due(step)
        with profiler.annotate(step):
            state, metrics = logger.choose(step, compiled.step)(state, next(loader))
        logger.log(step, metrics)
        watchdog.count_step(step, metrics["loss"])
        profiler.is_complete(step)
        return metrics["loss"]

    def block(take_step: Callable[[int], jax.Array], steps: int = args.steps) -> tuple[float, float]:
        """Time and CPU time per step."""
        start, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready([take_step(step) for step in range(args.steps - steps + 1, args.steps + 1)])
        logger.flush()
        return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps

    block(plain)
    block(observed)
    pairs = [(block(observed), block(plain)) for _ in range(args.rounds)]
    single = [(block(observed, 1)[1], block(plain, 1)[1]) for _ in range(args.rounds)]
    loss = plain(0)
    start = time.perf_counter()
    for step in range(CALLS):
        profiler.is_due(step)
        with profiler.annotate(step):
            logger.choose(1, plain)
        logger.log(step, {})
        watchdog.count_step(step, loss)
        profiler.is_complete(step)
    hooks = (time.perf_counter() - start) / CALLS
    for item in (watchdog, usage, logger, loader):
        item.close()
    print(json.dumps(summarize(pairs, single, hooks)))


if __name__ == "__main__":
    main()
