"""The record of a benchmark: target, environment, results, and device memory, one line of JSON.

If memory is not enough, the error suggests settings that need less.
"""

import dataclasses
import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import jax

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.config import parameter_estimate
from maxhydra.config.schema.hardware import Platform
from maxhydra.config.schema.model import RematPolicy
from maxhydra.config.schema.optimizer import OptimizerKind
from maxhydra.record import redact_argv
from maxhydra.record.processes import host_bytes
from maxhydra.runtime import Machine, original_environment
from maxhydra.runtime.flags import flags_in_effect

BenchRecord = dict[str, Any]
# The data option of a command that does not choose one.
DEFAULT_DATA = "demo"
# Parts of XLA's error messages.
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")
# Tasks that train all weights of the model, or only load them.
TRAINING_TASKS = ("pretrain", "sft", "dpo", "reward_model", "grpo", "distill")
INFERENCE_TASKS = ("decode", "serve", "score", "eval", "teacher_logits")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Copies of the weights in the optimizer state, at least; mu_dtype may halve the first one.
MOMENTS = {OptimizerKind.adamw: 1.5, OptimizerKind.muon: 0.5, OptimizerKind.lion: 0.5}
# Prefixes of overrides that do not affect the result: measurement and storage settings.
IRRELEVANT = ("task", "run.")


@dataclasses.dataclass(frozen=True)
class BenchTarget:
    """A config on a machine; each record lists its choices, overrides and XLA flags."""

    config: Config
    machine: Machine
    choices: dict[str, str]
    overrides: tuple[str, ...]

    def line(self, what: str, **measured: Any) -> BenchRecord:
        model = self.choices.get("model")
        overrides = [text for text in self.overrides if not text.startswith(IRRELEVANT)]
        flags = list(flags_in_effect(original_environment()))
        return {
            "bench": what,
            **({"model": model} if model else {}),
            "overrides": redact_argv(overrides),
            **({"xla_flags": redact_argv(flags)} if flags else {}),
            "device": self.machine.device_kind,
            "devices": self.machine.devices,
            "jax": jax.__version__,
            "flax": version("flax"),
            "date": datetime.date.today().isoformat(),
            **measured,
        }


def with_synthetic_data(config: Config, choices: dict[str, str], overrides: tuple[str, ...]) -> Config:
    """The config with synthetic data, unless the command or an experiment chooses data."""
    is_chosen = choices.get("data", DEFAULT_DATA) != DEFAULT_DATA or any(text.startswith("data") for text in overrides)
    return (
        config if is_chosen else dataclasses.replace(config, data=dataclasses.replace(config.data, source="synthetic"))
    )


class OutOfMemoryError(Exception):
    """The benchmark does not fit in device memory; the message suggests settings that need less."""


def needed_gib(compiled: Any) -> float | None:
    """Memory per device of a running program as planned by the compiler; None if the compiler does not report it."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    buffers = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (buffers + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes) / 2**30


def peak_gib() -> float | None:
    """Peak device memory of this process so far; None if the device does not report it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None


@contextmanager
def explain_out_of_memory(suggestion: str) -> Iterator[None]:
    """Turn an out-of-memory error of XLA or of NumPy into an OutOfMemoryError of one line."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        first = (str(error).splitlines() or ["on the host"])[0]
        # XLA on a CPU: `INTERNAL: Error dispatching computation: Out of memory allocating 8 bytes.`
        if isinstance(error, jax.errors.JaxRuntimeError) and not any(mark in first for mark in OUT_OF_MEMORY):
            raise
        detail = first.partition("RESOURCE_EXHAUSTED: ")[2] or first.partition("Out of memory ")[2] or first
        detail = detail.removeprefix("Out of memory").strip(" .:")
        available = f"{available_bytes() / 2**30:.1f} GiB available"
        raise OutOfMemoryError(f"out of memory ({detail}; {available}); {suggestion}") from error


def available_bytes() -> float:
    """Free memory of the first device, or of the host if the device does not report it (a CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host_bytes()


def require_memory(config: Config, machine: Machine) -> None:
    """Raise ConfigError if the weights and the optimizer state alone exceed the memory, before anything is built.

    The estimate is a lower bound: activations, gradients and caches come on top.
    """
    training = config.task.name in TRAINING_TASKS
    if not training and config.task.name not in INFERENCE_TASKS:
        return
    needed = parameter_estimate(config.model) * _bytes_per_weight(config, training=training)
    is_host = machine.memory_gib is None or machine.hardware.platform is Platform.cpu
    # At most: processes may share a host.
    available = host_bytes() * machine.process_count if is_host else (machine.memory_gib or 0) * 2**30 * machine.devices
    if needed > available:
        what = "weights and optimizer state" if training else "weights"
        hosts = (
            "this host has" if machine.process_count == 1 else f"the hosts of {machine.process_count} processes have"
        )
        memory = hosts if is_host else f"{machine.devices} x {machine.device_kind} have"
        sizes = f"{needed / 2**30:.1f} GiB ({needed:.0f} bytes) for {what}, but {memory} {available / 2**30:.1f} GiB"
        reason = f"needs at least {sizes} ({available:.0f} bytes)"
        raise ConfigError(Problem("model", reason, hint=suggest_less_memory(config)))


def _bytes_per_weight(config: Config, *, training: bool) -> float:
    """A lower bound of the bytes that each weight takes, with the optimizer state if all weights are trained."""
    is_frozen = training and config.adapter.is_enabled
    if config.quantization.kinds or is_frozen:
        return 0.5  # INT4 or NF4
    dtypes = config.model.dtypes
    size = DTYPE_BYTES[(dtypes.weights if training else dtypes.compute).value]
    return size * (1 + MOMENTS.get(config.optimizer.kind, 0)) if training else size


def suggest_less_memory(config: Config) -> str:
    """Settings that would need less memory and are not in use yet."""
    if config.task.name in INFERENCE_TASKS:
        has_engine = config.task.name in ("decode", "serve")
        cache = "a smaller task.engine.cache_tokens, " if has_engine else ""
        return f"try {cache}quantization=int8_weights, or more devices or processes (mesh.fsdp, mesh.tensor)"
    train, settings = config.train, []
    if train.per_device_batch_size > 1:
        settings.append(f"train.per_device_batch_size under {train.per_device_batch_size:g} with more train.grad_accum")
    if config.model.remat.policy is not RematPolicy.full:
        settings.append("model.remat.policy=full")
    if not 0 < train.chunk <= 1024 < train.seq_len:
        settings.append(f"train.loss_chunk={min(1024, train.seq_len)}")
    return f"try {', '.join([*settings, 'optimizer=adafactor, or more devices'])}"
