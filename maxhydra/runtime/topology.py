"""Devices of a TPU slice that is not here, for which programs can be compiled: libtpu alone is needed, no TPU."""

import importlib.util
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware
from maxhydra.runtime.flags import merge_flags

# libtpu looks for a TPU of this host, and for its neighbours, unless it is told of some.
ASSUMED = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def slice_devices(name: str, *, slices: int, hardware: Hardware) -> Sequence[jax.Device]:
    """Devices of a topology such as v5e:2x4, with the compiler flags of the hardware option."""
    if importlib.util.find_spec("libtpu") is None:
        hint = "pip install libtpu, in the version that jax names (pip install 'jax[tpu]'); it needs Linux on x86-64"
        raise ConfigError(Problem("task.topology", "libtpu is not installed", value=name, hint=hint))
    flags = merge_flags(hardware.xla_flags, os.environ.get("LIBTPU_INIT_ARGS", ""))
    os.environ.update({**ASSUMED, **os.environ, "LIBTPU_INIT_ARGS": flags})
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = f"libtpu knows no such slice: {str(error).splitlines()[0]}"
        accepted = "a generation and its shape, such as v5e:2x4, v5p:2x2x1 or v6e:4x4"
        raise ConfigError(Problem("task.topology", reason, value=name, accepted=accepted)) from None
