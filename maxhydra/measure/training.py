"""Speed and memory of the training step."""

import dataclasses
import logging
import time
from contextlib import closing
from typing import Any

import jax

from maxhydra import data, model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.measure.memory import OutOfMemoryError, lower_in_training, memory_explained, needed_gib, peak_gib
from maxhydra.measure.record import BenchRecord, BenchTarget
from maxhydra.runtime import Machine
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import LoaderBatches, TrainingSetup, next_token_loss, plan_batches, plan_states
from maxhydra.train.compile import reserve_gpu_headroom
from maxhydra.train.trainer import compile_step

log = logging.getLogger("maxhydra")
# Of a device's memory: what a compiler plans can be a little more than what is held in the end.
SURELY = 1.1


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step and what it eats."""

    config: Config
    machine: Machine
    training: TrainingSetup
    loader: data.Loader
    step: Any
    compile_seconds: float

    @property
    def needed_gib(self) -> float | None:
        return needed_gib(self.step)


def prepare(config: Config, machine: Machine) -> CompiledStep:
    """The step of a config, compiled; no weights are made yet."""
    if config.train.ramp.start is not None:
        reason = "is not measured: a batch that grows has no speed of its own"
        raise ConfigError(Problem("train.ramp.start", reason, value=config.train.ramp.start, accepted="null"))
    training, loader = plan(config)
    log.info("compiling the step")
    step, seconds = compile_step(training, config, loader.peek())
    prepared = CompiledStep(config, machine, training, loader, step, seconds)
    log.info("compiled in %.1f s%s", seconds, _needs(prepared.needed_gib))
    return prepared


def plan(config: Config) -> tuple[TrainingSetup, data.Loader]:
    """What a pretraining run of the config would train."""
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    states = plan_states(config, sharder)
    spec = plan_batches(config, sharder)
    loader = data.train_loader(config.data, spec)
    loss = next_token_loss(states.model, sharder, config.train)
    return TrainingSetup(states, loss, spec, LoaderBatches(loader), evaluate=None), loader


def measure_training(subject: BenchTarget, *, warm_up: int, steps: int) -> BenchRecord:
    """The line of a config's training step. OutOfMemoryError where the devices cannot hold it."""
    config, machine = subject.config, subject.machine
    with memory_explained(lower_in_training(config)):
        prepared = prepare(config, machine)
        with closing(prepared.loader):
            _require_fits(prepared)
            seconds, losses = timed_steps(prepared, warm_up=warm_up, steps=steps)
    return subject.line("pretrain", settings=_settings(config), **_figures(prepared, seconds), loss=losses)


def timed_steps(prepared: CompiledStep, *, warm_up: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of a step, and the losses of the first and the last."""
    states = prepared.training.states
    with reserve_gpu_headroom(states.sharder):
        state = states.create(prepared.config.run.seed)
    losses: list[jax.Array] = []
    log.info("%d steps, %d before them", steps, warm_up)
    for number in range(warm_up + steps):
        if number == warm_up:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, metrics = prepared.step(state, next(prepared.loader))
        losses.append(metrics["loss"])
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / steps, [round(float(losses[0]), 4), round(float(losses[-1]), 4)]


def _require_fits(prepared: CompiledStep) -> None:
    """Say what surely cannot fit before weights are made, which would take time to find out."""
    needed, there = prepared.needed_gib, prepared.machine.memory_gib
    if needed is not None and there is not None and needed > SURELY * there:
        ways = lower_in_training(prepared.config)
        raise OutOfMemoryError(f"out of memory: the step needs {needed:.1f} GiB, a device has {there:.1f}; {ways}")


def _figures(prepared: CompiledStep, seconds: float) -> dict[str, Any]:
    config, machine, rows = prepared.config, prepared.machine, prepared.training.spec.rows
    tokens = prepared.training.spec.batch * rows.seq_len
    tflops = tokens * model.flops_per_token(config.model, rows.seq_len) / seconds / machine.devices / 1e12
    peak = machine.peak_tflops(config.model.dtypes.compute.value)
    return {
        "tokens_per_second": round(tokens / seconds),
        "step_ms": round(seconds * 1e3, 2),
        "tflops_per_device": round(tflops, 1 if tflops >= 10 else 4),
        "mfu": round(tflops / peak, 4) if peak else None,
        "peak_memory_gib": _rounded(peak_gib()),
        "needed_memory_gib": _rounded(prepared.needed_gib),
        "compile_s": round(prepared.compile_seconds, 1),
    }


def _settings(config: Config) -> dict[str, Any]:
    """What speed depends on most, as it was in the end."""
    of_model, train = config.model, config.train
    return {
        "data": config.data.source,
        "seq_len": train.seq_len,
        "per_device_batch_size": train.per_device_batch_size,
        "grad_accum": train.grad_accum,
        "remat": of_model.remat.policy.value,
        "scan_unroll": of_model.scan_unroll,
        "loss_chunk": train.loss_chunk,
        "weights": of_model.dtypes.weights.value,
        "compute": of_model.dtypes.compute.value,
        "logits": of_model.dtypes.logits.value,
        "quantization": config.quantization.kind.value,
        "optimizer": config.optimizer.kind.value,
        "adapter": config.adapter.kind.value,
        "attention": of_model.kernels.attention.value,
        "compilation_cache": config.hardware.compilation_cache is not None,
    }


def _rounded(gib: float | None) -> float | None:
    return None if gib is None else round(gib, 2 if gib >= 1 else 4)


def _needs(gib: float | None) -> str:
    return "" if gib is None else f", needs {gib:.2f} GiB of a device"
