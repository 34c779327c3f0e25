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

from maxhydra.config import Config
from maxhydra.config.schema.model import RematPolicy
from maxhydra.record import redact_argv
from maxhydra.runtime import Machine, original_environment
from maxhydra.runtime.flags import flags_in_effect

BenchRecord = dict[str, Any]
# The data option of a command that does not choose one.
DEFAULT_DATA = "demo"
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
    """Turn an out-of-memory error of XLA into an OutOfMemoryError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in first:
            raise
        detail = first.partition("RESOURCE_EXHAUSTED: ")[2].removeprefix("Out of memory").strip(" .:")
        raise OutOfMemoryError(f"out of memory ({detail}); {suggestion}") from error


def suggest_less_memory(config: Config) -> str:
    """Settings that would need less memory in training and are not in use yet."""
    train, settings = config.train, []
    if train.per_device_batch_size > 1:
        settings.append(f"train.per_device_batch_size under {train.per_device_batch_size:g} with more train.grad_accum")
    if config.model.remat.policy is not RematPolicy.full:
        settings.append("model.remat.policy=full")
    if not 0 < train.loss_chunk <= 1024 < train.seq_len:
        settings.append(f"train.loss_chunk={min(1024, train.seq_len)}")
    return f"try {', '.join([*settings, 'optimizer=adafactor, or more devices'])}"
