"""Cost of watchdog, goodput and profiler hooks per training step, with no profile active. One JSON line.

python bench/watch_overhead.py [--rounds 30] [--steps 20] [OVERRIDE ...]

Blocks of steps with and without the hooks alternate in one process, with one compiled step. `ratio` is the median of
the ratios of neighbouring blocks; `hooks_us` is the time of the hooks alone, for machines on which other processes
change the time of a step by more than 1 %.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.measure.training import prepare
from maxhydra.runtime.profiler import Profiler
from maxhydra.runtime.watchdog import Watchdog

CALLS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*", default=["model=micro"])
    args = parser.parse_args()
    config = compose(args.overrides).config
    compiled = prepare(config, runtime.start(config.hardware))
    state, loader, folder = compiled.training.states.create(0), compiled.loader, Path(tempfile.mkdtemp())
    watchdog, profiler = Watchdog(config.watchdog, folder), Profiler(config.profile, folder)
    watchdog.start(0)

    def plain(step: int) -> jax.Array:
        nonlocal state
        state, metrics = compiled.step(state, next(loader))
        return metrics["loss"]

    def hooked(step: int) -> jax.Array:
        profiler.is_due(step)
        with profiler.annotate(step):
            loss = plain(step)
        watchdog.count_step(step, loss)
        profiler.is_complete(step)
        return loss

    def block(take_step: Callable[[int], jax.Array]) -> float:
        start = time.perf_counter()
        losses = [take_step(step) for step in range(args.steps)]
        jax.block_until_ready(losses)
        return (time.perf_counter() - start) / args.steps

    block(plain)
    pairs = [(block(hooked), block(plain)) for _ in range(args.rounds)]
    loss = plain(0)
    start = time.perf_counter()
    for step in range(CALLS):
        profiler.is_due(step)
        with profiler.annotate(step):
            pass
        watchdog.count_step(step, loss)
        profiler.is_complete(step)
    hooks = (time.perf_counter() - start) / CALLS
    watchdog.close()
    loader.close()
    step_s = statistics.median(bare for _, bare in pairs)
    figures = {
        "step_ms": round(1e3 * step_s, 3),
        "ratio": round(statistics.median(on / off for on, off in pairs), 4),
        "hooks_us": round(1e6 * hooks, 2),
        "hooks_share": round(hooks / step_s, 6),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
