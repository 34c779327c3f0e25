"""Compile time of the training step with 4 and 64 layers, which the scan should keep equal. Prints one JSON line.

python bench/compile_time.py
"""

import json
import time

import jax

from maxhydra import data
from maxhydra.config.compose.composer import compose
from maxhydra.sharding import Sharder
from maxhydra.train import next_token_loss
from maxhydra.train.batches import plan_batches
from maxhydra.train.compile import trace_step
from maxhydra.train.state import plan_states


def seconds(layers: int) -> float:
    """Seconds to trace, lower and compile, without caches."""
    jax.clear_caches()
    config = compose([f"model.num_layers={layers}", "model.scan_unroll=1", "model.remat.policy=minimal"]).config
    sharder = Sharder.from_config(config.mesh)
    loader = data.train_loader(config.data, plan_batches(config, sharder))
    batch = loader.peek()
    start = time.perf_counter()
    states = plan_states(config, sharder)
    trace_step(states, next_token_loss(states.model, sharder, config.train), config.train, batch).lower().compile()
    elapsed = time.perf_counter() - start
    loader.close()
    return elapsed


def main() -> None:
    seconds(2)
    shallow, deep = (min(seconds(layers) for _ in range(3)) for layers in (4, 64))
    line = {"bench": "compile_time", "unit": "s", "layers_4": shallow, "layers_64": deep, "ratio": deep / shallow}
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in line.items()}))


if __name__ == "__main__":
    main()
