"""Device memory of compiled programs, and suggestions when it is not enough."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from maxhydra.config import Config
from maxhydra.config.schema.model import RematPolicy


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
