"""What the run stands on: chips, their ceilings, compiler flags, and how the processes find each other."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem


class Platform(Enum):
    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"


class Precision(Enum):
    default = "default"
    high = "high"
    highest = "highest"


class Cluster(Enum):
    auto = "auto"
    none = "none"
    slurm = "slurm"
    gke = "gke"
    gpu_multiprocess = "gpu_multiprocess"
    environment = "environment"


@schema
class Distributed(Schema):
    """How the processes of one run meet."""

    cluster: Cluster = Cluster.auto
    """auto looks for SLURM, a GKE JobSet or TPU pod, then JAX_COORDINATOR_ADDRESS; none stays alone;
    gpu_multiprocess is one process per GPU of this host."""
    timeout_seconds: int = option(300, ge=1)
    """How long to wait for the other processes."""


@schema
class GkeNodes(Schema):
    """Nodes of Google Kubernetes Engine that have this chip."""

    accelerator: str | None = None
    """Value of their label gke-tpu-accelerator or gke-accelerator. null: there are none."""
    chips_per_node: int = option(8, ge=1)
    """Chips of a node."""
    one_node_chips: int = option(8, ge=1)
    """tpu: a slice of up to so many chips is one node."""
    dimensions: int = option(2, ge=2, le=3)
    """tpu: numbers in the topology of a slice, 2 for 4x4, 3 for 2x2x4."""


@schema
class Hardware(Schema):
    """A kind of chip. Ceilings are per device, dense, as the vendor states them."""

    platform: Platform = Platform.auto
    """JAX platform; auto looks for a GPU, then a TPU, then takes the CPU."""
    device_kinds: list[str] = option([])
    """Regular expressions on the device name by which hardware=auto finds this option."""
    peak_tflops: dict[str, float] = option({})
    """Dense matrix TFLOP/s by number format (bfloat16, float8, int8, ...)."""
    memory_gib: float | None = option(None, gt=0)
    """Device memory."""
    bandwidth_gb_s: float | None = option(None, gt=0)
    """Device memory bandwidth, 10^9 bytes a second."""
    xla_flags: list[str] = option([])
    """Added to XLA_FLAGS (LIBTPU_INIT_ARGS on a TPU) before the backend starts; what the environment sets wins."""
    flag_sets: dict[str, list[str]] = option({})
    """Flags by a name of your choice that task=tune tries, each set over xla_flags."""
    compilation_cache: str | None = "~/.cache/maxhydra/xla"
    """Folder of compiled programs, so that a resumed run starts at once. null: none."""
    matmul_precision: Precision = Precision.default
    """Precision of float32 matrix products."""
    simulated_devices: int | None = option(None, ge=1)
    """cpu: pretend to have so many devices."""
    debug_nans: bool = False
    """Stop at the operation that first makes a NaN; slow."""
    distributed: Distributed = section(Distributed)
    gke: GkeNodes = section(GkeNodes)

    def check(self) -> Iterator[Problem]:
        if self.simulated_devices is not None and self.platform is not Platform.cpu:
            yield Problem(
                "simulated_devices",
                f"is not used by platform={self.platform.value}",
                value=self.simulated_devices,
                hint="choose hardware=cpu",
            )
