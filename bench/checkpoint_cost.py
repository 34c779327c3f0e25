"""Cost of asynchronous checkpointing per step: the default run with and without it, alternating. One JSON line.

python bench/checkpoint_cost.py [--steps 200] [--every 100] [--rounds 3]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from maxhydra import data
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.checkpoint import Checkpoint, SaveMode
from maxhydra.sharding import Sharder
from maxhydra.train import next_token_loss
from maxhydra.train.batches import plan_batches
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.compile import trace_step
from maxhydra.train.state import plan_states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    config = compose([]).config
    sharder = Sharder.from_config(config.mesh)
    states = plan_states(config, sharder)
    loader = data.train_loader(config.data, plan_batches(config, sharder))
    loss = next_token_loss(states.model, sharder, config.train)
    step = trace_step(states, loss, config.train, loader.peek()).lower().compile()

    def round_time(mode: SaveMode) -> float:
        state = states.create(0)
        with tempfile.TemporaryDirectory() as folder:
            checkpointer = open_checkpointer(Path(folder), Checkpoint(mode=mode, every=options.every, keep=2))
            state, metrics = step(state, next(loader))
            float(metrics["loss"])
            start = time.perf_counter()
            for i in range(1, options.steps + 1):
                state, metrics = step(state, next(loader))
                if i % options.every == 0:
                    checkpointer.save(i, state, loader.state(), {})
            checkpointer.wait()
            float(metrics["loss"])
            elapsed = time.perf_counter() - start
            checkpointer.close()
        return elapsed / options.steps

    round_time(SaveMode.asynchronous)
    times: dict[SaveMode, list[float]] = {SaveMode.off: [], SaveMode.asynchronous: [], SaveMode.synchronous: []}
    for _ in range(options.rounds):
        for mode, seconds in times.items():
            seconds.append(round_time(mode))
    off, asynchronous, synchronous = (statistics.median(seconds) for seconds in times.values())
    line = {
        "bench": "checkpoint_cost",
        "step_ms": off * 1e3,
        "asynchronous_percent": (asynchronous / off - 1) * 100,
        "synchronous_percent": (synchronous / off - 1) * 100,
        "spread_percent": (max(times[SaveMode.off]) / min(times[SaveMode.off]) - 1) * 100,
        "every": options.every,
    }
    print(json.dumps({name: round(value, 2) if isinstance(value, float) else value for name, value in line.items()}))


if __name__ == "__main__":
    main()
