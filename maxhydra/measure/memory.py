"""What a compiled program needs of a device's memory, and what to lower where that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from maxhydra.config import Config
from maxhydra.config.schema.model import RematPolicy


class OutOfMemoryError(Exception):
    """The devices cannot hold what was asked; the text says what would need less."""


def needed_gib(compiled: Any) -> float | None:
    """Memory of a device while the program runs, as its compiler planned it; None where the compiler does not tell."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return (held + found.temp_size_in_bytes + found.generated_code_size_in_bytes) / 2**30


def peak_gib() -> float | None:
    """The most that this process has held on a device so far, where the device counts it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None


@contextmanager
def memory_explained(way_out: str) -> Iterator[None]:
    """A device that runs out of memory is not a bug: say so in a line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in first:
            raise
        said = first.partition("RESOURCE_EXHAUSTED: ")[2].removeprefix("Out of memory").strip(" .:")
        raise OutOfMemoryError(f"out of memory ({said}); {way_out}") from error


def lower_in_training(config: Config) -> str:
    """What would need less memory in training, of the settings that can still give."""
    train, ways = config.train, []
    if train.per_device_batch_size > 1:
        ways.append(f"train.per_device_batch_size under {train.per_device_batch_size:g} with more train.grad_accum")
    if config.model.remat.policy is not RematPolicy.full:
        ways.append("model.remat.policy=full")
    if not 0 < train.loss_chunk <= 1024 < train.seq_len:
        ways.append(f"train.loss_chunk={min(1024, train.seq_len)}")
    return f"try {', '.join([*ways, 'optimizer=adafactor, or more devices'])}"
