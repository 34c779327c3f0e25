"""Speed of the training step on this machine, with any overrides of the command line. One JSON line.

python bench/pretrain.py model=llama3.2-1b train.seq_len=4096 train.per_device_batch_size=8 model.remat.policy=minimal
"""

import dataclasses
import json
import sys
import time
from typing import Any

import jax

from maxhydra import data, model, runtime
from maxhydra.config import Config
from maxhydra.config.compose import compose
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import LoadedBatches, Training, next_token_loss, plan_batches, plan_states
from maxhydra.train.session import compile_step

WARM_UP, TIMED = 3, 20


@dataclasses.dataclass(frozen=True)
class Bench:
    """A compiled step and what it eats."""

    config: Config
    machine: runtime.Machine
    training: Training
    loader: data.Loader
    step: Any
    compile_seconds: float


def prepare(overrides: list[str]) -> Bench:
    """The training step of these overrides on synthetic data, compiled."""
    config = compose(["data=synthetic", *overrides]).config
    machine = runtime.start(config.hardware)
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    states = plan_states(config, sharder)
    spec = plan_batches(config, sharder)
    loader = data.train_loader(config.data, spec)
    loss = next_token_loss(states.model, sharder, config.train)
    training = Training(states, loss, spec, LoadedBatches(loader), evaluate=None)
    return Bench(config, machine, training, loader, *compile_step(training, config, loader.peek()))


def main(overrides: list[str]) -> None:
    bench = prepare(overrides)
    config, machine, training, loader = bench.config, bench.machine, bench.training, bench.loader
    state = training.states.create(0)
    losses = []
    for i in range(WARM_UP + TIMED):
        if i == WARM_UP:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, metrics = bench.step(state, next(loader))
        losses.append(metrics["loss"])
    jax.block_until_ready(state)
    step_time = (time.perf_counter() - began) / TIMED
    loader.close()

    tokens = training.spec.batch * training.spec.rows.seq_len
    tflops = (
        tokens * model.flops_per_token(config.model, training.spec.rows.seq_len) / step_time / machine.devices / 1e12
    )
    peak = machine.peak_tflops(config.model.dtypes.compute.value)
    stats = jax.local_devices()[0].memory_stats() or {}
    line = {
        "bench": "pretrain",
        "overrides": overrides,
        "device": machine.device_kind,
        "devices": machine.devices,
        "jax": jax.__version__,
        "tokens_per_second": round(tokens / step_time),
        "step_ms": round(step_time * 1e3, 2),
        "tflops_per_device": round(tflops, 1),
        "mfu": round(tflops / peak, 4) if peak else None,
        "peak_memory_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 2),
        "compile_s": round(bench.compile_seconds, 1),
        "loss": [round(float(losses[0]), 4), round(float(losses[-1]), 4)],
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
