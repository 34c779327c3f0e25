"""Virtual devices of a TPU slice, for ahead-of-time compilation: needs libtpu but no TPU."""

import importlib.util
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware
from maxhydra.runtime.flags import merge_flags

# Without these libtpu searches for a TPU on this host and for other workers.
LIBTPU_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def slice_devices(name: str, *, slices: int, hardware: Hardware) -> Sequence[jax.Device]:
    """Devices of a topology such as v5e:2x4; sets the XLA flags of the hardware option."""
    if importlib.util.find_spec("libtpu") is None:
        hint = "pip install 'jax[tpu]', which pins the matching libtpu; it requires Linux on x86-64"
        raise ConfigError(Problem("task.topology", "libtpu is not installed", value=name, hint=hint))
    flags = merge_flags(hardware.xla_flags, os.environ.get("LIBTPU_INIT_ARGS", ""))
    os.environ.update({**LIBTPU_ENVIRONMENT, **os.environ, "LIBTPU_INIT_ARGS": flags})
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = f"is not a topology that libtpu knows: {str(error).splitlines()[0]}"
        accepted = "TPU generation and slice shape, such as v5e:2x4, v5p:2x2x1 or v6e:4x4"
        raise ConfigError(Problem("task.topology", reason, value=name, accepted=accepted)) from None
