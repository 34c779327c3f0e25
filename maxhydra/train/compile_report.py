"""A training step compiled for devices that need not be here: what it would take of their memory, and its kernels."""

import dataclasses
import re
import time
from collections import Counter

import jax

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.model import flops_per_token
from maxhydra.sharding import Sharder
from maxhydra.train.batches import plan_batches
from maxhydra.train.objectives import next_token_loss
from maxhydra.train.state import plan_states
from maxhydra.train.trainer import trace_step

# A kernel in a compiled program, by the name that it was given.
KERNEL = re.compile(r'^\s*(?:ROOT )?%?([A-Za-z_]\w*)[\w.-]* = .*custom_call_target="tpu_custom_call"', re.MULTILINE)
COLUMNS = {"tokens": "int32", "targets": "int32", "positions": "int32", "segments": "int32", "weights": "float32"}


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What the compiler says of a step."""

    device: str
    devices: int
    seconds: float
    """Of compiling."""
    bytes_per_device: dict[str, int]
    """Of the state and the batch, of what the step holds besides, and of the program."""
    kernels: dict[str, int]
    """Kernels by name, as often as they stand in the program; in a loop over layers they run more often."""
    tflop_per_device: float
    """Of the model, a step."""


def compile_report(config: Config, sharder: Sharder) -> CompileReport:
    """What the compiler says of the step, for the devices of the sharder's mesh."""
    assert isinstance(sharder.mesh, jax.sharding.Mesh)
    spec, began = plan_batches(config, sharder), time.perf_counter()
    try:
        compiled = traced_step(config, sharder).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        raise _explained(error, config) from None
    used, devices = compiled.memory_analysis(), sharder.mesh.devices.flat
    tokens = spec.batch * spec.rows.seq_len
    return CompileReport(
        device=devices[0].device_kind,
        devices=len(devices),
        seconds=time.perf_counter() - began,
        bytes_per_device={
            "state and batch": used.argument_size_in_bytes,
            "besides": used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes,
            "program": used.generated_code_size_in_bytes,
        },
        kernels=dict(Counter(KERNEL.findall(compiled.as_text()))),
        tflop_per_device=flops_per_token(config.model, spec.rows.seq_len) * tokens / len(devices) / 1e12,
    )


def traced_step(config: Config, sharder: Sharder) -> jax.stages.Traced:
    """The step of pretraining on packed rows."""
    spec, states = plan_batches(config, sharder), plan_states(config, sharder)
    shape = (spec.batch, spec.rows.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=spec.sharding) for name, dtype in COLUMNS.items()}
    return trace_step(states, next_token_loss(states.model, sharder, config.train), config.train, batch)


def _explained(error: Exception, config: Config) -> Exception:
    """Memory that does not suffice is the config's mistake; all else is not known here."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    reason = f"the step does not fit: {str(error).splitlines()[0]}"
    hint = "or more devices, model.remat.policy=full, train.loss_chunk=1024"
    value = config.train.per_device_batch_size
    return ConfigError(Problem("train.per_device_batch_size", reason, value=value, accepted="less", hint=hint))
