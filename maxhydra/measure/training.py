"""Speed and memory of the training step."""

import dataclasses
import logging
import time
from contextlib import closing
from typing import Any

import jax

from maxhydra import data, model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.measure.record import (
    BenchRecord,
    BenchTarget,
    OutOfMemoryError,
    explain_out_of_memory,
    needed_gib,
    peak_gib,
    suggest_less_memory,
)
from maxhydra.runtime import Machine
from maxhydra.sharding import Sharder
from maxhydra.train import LoaderBatches, TrainingSetup, plan_batches, plan_states, training_loss
from maxhydra.train.compile import compile_step, reserve_gpu_headroom

log = logging.getLogger("maxhydra")
# Reject a step only above this multiple of the device memory: compilers plan slightly more than is used in the end.
MEMORY_TOLERANCE = 1.1


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled training step and its data."""

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
    """Compile the training step of a config, without allocating weights."""
    if config.train.ramp.start is not None:
        reason = "is not supported by task=bench: a ramped batch has no single speed"
        raise ConfigError(Problem("train.ramp.start", reason, value=config.train.ramp.start, accepted="null"))
    training, loader = plan(config)
    log.info("compiling the step")
    step, seconds = compile_step(training.states, training.loss, config.train, loader.peek())
    compiled = CompiledStep(config, machine, training, loader, step, seconds)
    log.info("compiled in %.1f s%s", seconds, _describe_memory(compiled.needed_gib))
    return compiled


def plan(config: Config) -> tuple[TrainingSetup, data.Loader]:
    """The setup of a pretraining run of the config, and its loader."""
    sharder = Sharder.from_config(config.mesh)
    states = plan_states(config, sharder)
    spec = plan_batches(config, sharder)
    loader = data.train_loader(config.data, spec)
    loss = training_loss(states.model, sharder, config.train)
    return TrainingSetup(states, loss, spec, LoaderBatches(loader), evaluate=None), loader


def measure_training(target: BenchTarget, *, warm_up: int, steps: int) -> BenchRecord:
    """The record of a config's training step; OutOfMemoryError if it does not fit."""
    config, machine = target.config, target.machine
    with explain_out_of_memory(suggest_less_memory(config)):
        compiled = prepare(config, machine)
        with closing(compiled.loader):
            _require_fits(compiled)
            seconds, losses = time_steps(compiled, warm_up=warm_up, steps=steps)
    return target.line("pretrain", settings=_settings(config), **_figures(compiled, seconds), loss=losses)


def time_steps(compiled: CompiledStep, *, warm_up: int, steps: int) -> tuple[float, list[float]]:
    """Seconds per step, and the losses of the first and the last step."""
    states = compiled.training.states
    with reserve_gpu_headroom(states.sharder):
        state = states.create(compiled.config.run.seed)
    losses: list[jax.Array] = []
    log.info("timing %d steps after %d warm-up steps", steps, warm_up)
    for number in range(warm_up + steps):
        if number == warm_up:
            jax.block_until_ready(state)
            start = time.perf_counter()
        state, metrics = compiled.step(state, next(compiled.loader))
        losses.append(metrics["loss"])
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / steps, [round(float(losses[0]), 4), round(float(losses[-1]), 4)]


def _require_fits(compiled: CompiledStep) -> None:
    """Fail before allocating weights if the step cannot fit, because running out of memory would take longer."""
    needed, available = compiled.needed_gib, compiled.machine.memory_gib
    if needed is not None and available is not None and needed > MEMORY_TOLERANCE * available:
        suggestion = suggest_less_memory(compiled.config)
        sizes = f"the step needs {needed:.1f} GiB, a device has {available:.1f}"
        raise OutOfMemoryError(f"out of memory: {sizes}; {suggestion}")


def _figures(compiled: CompiledStep, seconds: float) -> dict[str, Any]:
    config, machine, rows = compiled.config, compiled.machine, compiled.training.spec.rows
    tokens = compiled.training.spec.batch * rows.seq_len
    flops = model.flops_per_token(config.model, rows.seq_len, has_adapter=config.adapter.is_enabled)
    tflops = tokens * flops / seconds / machine.devices / 1e12
    peak = machine.hardware.mfu_peak(config.model.dtypes.compute.value, config.quantization)
    return {
        "tokens_per_second": round(tokens / seconds),
        "step_ms": round(seconds * 1e3, 2),
        "tflops_per_device": round(tflops, 1 if tflops >= 10 else 4),
        "mfu": round(tflops / peak[1], 4) if peak else None,
        "mfu_dtype": peak[0] if peak else None,
        "peak_memory_gib": _rounded(peak_gib()),
        "needed_memory_gib": _rounded(compiled.needed_gib),
        "compile_s": round(compiled.compile_seconds, 1),
    }


def _settings(config: Config) -> dict[str, Any]:
    """The effective values of the settings that affect speed most."""
    model_config, train = config.model, config.train
    return {
        "data": config.data.source,
        "seq_len": train.seq_len,
        "per_device_batch_size": train.per_device_batch_size,
        "grad_accum": train.grad_accum,
        "remat": model_config.remat.policy.value,
        "scan_unroll": model_config.scan_unroll or "auto",
        "loss_chunk": train.chunk,
        "weights": model_config.dtypes.weights.value,
        "compute": model_config.dtypes.compute.value,
        "logits": model_config.dtypes.logits.value,
        "quantization": config.quantization.kind.value,
        "optimizer": config.optimizer.kind.value,
        "adapter": config.adapter.kind.value,
        "attention": model_config.kernels.attention.value,
        "compilation_cache": config.hardware.compilation_cache is not None,
    }


def _rounded(gib: float | None) -> float | None:
    return None if gib is None else round(gib, 2 if gib >= 1 else 4)


def _describe_memory(gib: float | None) -> str:
    return "" if gib is None else f", needs {gib:.2f} GiB per device"
