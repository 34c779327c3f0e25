"""Schema of hardware and mesh.

Hardware: chips and their peak rates, compiler flags, multi-process setup. Mesh: devices per axis, within and across
slices, and sharding rules.
"""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.schema.quantization import MATMUL_DTYPES, Quantization


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
    """How the processes of a multi-process run find each other (jax.distributed)."""

    cluster: Cluster = Cluster.auto
    """auto detects SLURM, a GKE JobSet or TPU pod, then JAX_COORDINATOR_ADDRESS; none runs a single process;
    gpu_multiprocess starts one process per GPU of this host."""
    timeout_seconds: int = option(300, ge=1)
    """Time to wait for the other processes."""
    silence_seconds: int = option(60, ge=15)
    """A process that has not responded for this time ends the run; one whose death is certain ends it at once."""


@schema
class GkeNodes(Schema):
    """Google Kubernetes Engine nodes with this chip."""

    accelerator: str | None = None
    """Value of the node label gke-tpu-accelerator or gke-accelerator. null: not available on GKE."""
    chips_per_node: int = option(8, ge=1)
    """Chips per node."""
    one_node_chips: int = option(8, ge=1)
    """tpu: largest slice, in chips, that is a single node."""
    dimensions: int = option(2, ge=2, le=3)
    """tpu: dimensions of a slice topology: 2 for 4x4, 3 for 2x2x4."""


@schema
class Links(Schema):
    """Links between devices, for task=plan. Rates are per device and direction, as published."""

    domain_devices: int = option(1, ge=1)
    """Devices that the fast links connect: the GPUs of a node, the chips of a TPU pod."""
    domain_gb_s: float | None = option(None, gt=0)
    """All fast links of a device together (NVLink, ICI), in 10^9 bytes per second."""
    torus_dimensions: int = option(0, ge=0, le=3)
    """Dimensions of the torus that the fast links form; 0: a switch."""
    network_gb_s: float | None = option(None, gt=0)
    """A device's share of the network between nodes or slices, in 10^9 bytes per second."""
    host_gb_s: float | None = option(None, gt=0)
    """Link to host memory, in 10^9 bytes per second, for optimizer.offload and offload_weights."""


@schema
class Hardware(Schema):
    """A kind of chip. Peak rates are per device, dense, as published by the vendor."""

    platform: Platform = Platform.auto
    """JAX platform; auto tries GPU, TPU, then CPU."""
    device_kinds: list[str] = option([])
    """Regular expressions on the device name by which hardware=auto selects this option."""
    peak_tflops: dict[str, float] = option({})
    """Dense matmul TFLOP/s by dtype (bfloat16, float8, int8, ...)."""
    memory_gib: float | None = option(None, gt=0)
    """Device memory."""
    bandwidth_gb_s: float | None = option(None, gt=0)
    """Device memory bandwidth in 10^9 bytes per second."""
    links: Links = section(Links)
    xla_flags: list[str] = option([])
    """Added to the flags of the hardware option, and all of them to XLA_FLAGS (LIBTPU_INIT_ARGS on a TPU) before the
    backend starts: a flag replaces one of the same name, ~--xla_name removes one; the environment takes precedence."""
    flag_sets: dict[str, list[str]] = option({})
    """Sets of flags for task=tune to try on top of xla_flags, by a name of your choice."""
    compilation_cache: str | None = "~/.cache/maxhydra/xla"
    """Folder of the persistent compilation cache, so that a resumed run does not compile again. null: no cache."""
    compiled: str | None = None
    """Folder of task=compile with the compiled training step, used instead of compiling it. Its config, source,
    versions and devices must be those of the run. It contains machine code: use only folders that you wrote. null:
    compile."""
    matmul_precision: Precision = Precision.default
    """Precision of float32 matmuls."""
    simulated_devices: int | None = option(None, ge=1)
    """cpu: number of simulated devices."""
    debug_nans: bool = False
    """Stop at the first operation that produces a NaN (jax_debug_nans); slow."""
    dump_step: bool = False
    """Write the training step to the folder `program` of the run: jaxpr, StableHLO, optimized HLO, and the compiler's
    memory analysis. Set by debug=dump."""
    distributed: Distributed = section(Distributed)
    gke: GkeNodes = section(GkeNodes)

    def mfu_peak(self, compute: str, quantization: Quantization) -> tuple[str, float] | None:
        """The dtype of a training step's matmuls and its peak TFLOP/s, to which MFU is relative; None if unknown.

        With quantization=fp8 or int8 it is that format, although some matmuls (the LM head's) stay in `compute`.
        """
        kinds = quantization.kinds
        quantized = [dtype for kind, dtype in MATMUL_DTYPES.items() if kind in kinds and dtype in self.peak_tflops]
        dtype = quantized[0] if quantized else compute
        return (dtype, self.peak_tflops[dtype]) if dtype in self.peak_tflops else None

    def check(self) -> Iterator[Problem]:
        if self.simulated_devices is not None and self.platform is not Platform.cpu:
            yield Problem(
                "simulated_devices",
                f"is not used by platform={self.platform.value}",
                value=self.simulated_devices,
                hint="choose hardware=cpu",
            )


class ContextStrategy(Enum):
    auto = "auto"
    ring = "ring"
    ulysses = "ulysses"
    all_gather = "all_gather"


# From least to most communication: devices on the fastest links are adjacent along the last axis.
AXES = ("replica", "data", "stage", "fsdp", "expert", "sequence", "tensor")
# Axes of DiLoCo, data and pipeline parallelism.
REPLICA, DATA, STAGE = "replica", "data", "stage"

# Logical axis -> mesh axes. Axes of activations start with `act_`; all others belong to weights.
RULES: dict[str, list[str]] = {
    # In the order of AXES, as "embed": the compiler turns other orders of one into the other by full replication.
    "act_batch": ["replica", "data", "stage", "fsdp", "expert"],
    "act_length": ["sequence"],
    "act_stream_length": ["sequence", "tensor"],
    "act_embed": [],
    "act_heads": ["tensor"],
    "act_kv_heads": ["tensor"],
    "act_mlp": ["tensor"],
    "act_experts": ["expert"],
    "act_vocab": ["tensor"],
    "replicas": ["replica"],
    "layers": ["stage"],
    "experts": ["expert"],
    "embed": ["stage", "fsdp", "expert", "sequence"],
    "latent": ["stage", "fsdp", "expert", "sequence"],
    "heads": ["tensor"],
    "kv_heads": ["tensor"],
    "head_dim": [],
    "mlp": ["tensor"],
    "vocab": ["tensor"],
    "positions": [],
    "norm": [],
}


@schema
class Axes(Schema):
    """Devices along each axis; one axis may be -1 and gets the remaining devices."""

    replica: int = option(1, ge=-1)
    """DiLoCo: replicas with weights and optimizer states of their own, averaged every train.diloco.period steps."""
    data: int = option(1, ge=-1)
    """Data parallelism: replicas of the model, each with a part of the batch."""
    stage: int = option(1, ge=-1)
    """Pipeline parallelism: the layers of the repeated pattern are sharded, and microbatches move from stage to stage;
    embedding, head and other layers use the axis like fsdp."""
    fsdp: int = option(1, ge=-1)
    """Fully sharded data parallelism: batch and weights are sharded; weights are all-gathered layer by layer."""
    expert: int = option(1, ge=-1)
    """Expert parallelism: experts are sharded; in other layers the axis acts as fsdp."""
    sequence: int = option(1, ge=-1)
    """Context parallelism: sequences are sharded along their length; mesh.context chooses how attention sees the rest.
    """
    tensor: int = option(1, ge=-1)
    """Tensor parallelism: heads, feed-forward columns and vocabulary are sharded, and between them the residual stream
    along its length (mesh.rules.act_stream_length)."""

    def check(self) -> Iterator[Problem]:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in sizes.items():
            if size == 0:
                yield Problem(
                    axis, "is not a size", value=0, accepted="a positive number, or -1 for the remaining devices"
                )
        automatic = [axis for axis, size in sizes.items() if size == -1]
        if len(automatic) > 1:
            yield Problem(
                automatic[-1],
                f"only one axis can be -1, but {automatic[0]} is -1 too",
                value=-1,
                accepted="a positive number",
            )


@schema
class Pipeline(Schema):
    """Schedule of pipeline parallelism (mesh.stage > 1)."""

    microbatches: int | None = option(None, ge=1)
    """Microbatches of one forward pass, a multiple of mesh.stage. More of them leave stages idle for less time. null:
    2 x mesh.stage if the sequences per device are even, otherwise mesh.stage."""
    repeats: int = option(1, ge=1)
    """Runs of consecutive layers on each stage (interleaved schedule). Idle time falls by this factor; the weights and
    gradients of the layers move between stages once per forward and backward pass, because they are stored in order."""


@schema
class Mesh(Axes):
    """Mesh axes within a slice (fast links); those across slices (data center network) are under dcn."""

    dcn: Axes = section(Axes)
    pipeline: Pipeline = section(Pipeline)
    slices: int | None = option(None, ge=1)
    """Number of slices. null: as reported by the devices."""
    context: ContextStrategy = ContextStrategy.auto
    """Attention over mesh.sequence. ring: keys and values travel around the devices, in zigzag order; ulysses: an
    all-to-all gives each device whole sequences of some heads, whose number mesh.sequence x mesh.tensor must divide;
    all_gather: keys and values are gathered, for windows and chunks only from the neighbours that they reach. auto:
    all_gather for windows, chunks and the sparse indexer, otherwise ulysses if the heads can be divided, else ring."""
    shard_state_over_data: bool = False
    """Shard optimizer moments and stored weights over data too (ZeRO-1): gradients are reduce-scattered, the weights
    of a step all-gathered once, those of layers in model.dtypes.compute. The bytes sent for layers equal those of an
    all-reduce of the gradients, but the gather does not overlap with the backward pass."""
    rules: dict[str, list[str]] = option(RULES)
    """Mesh axes over which each logical axis is sharded, in order."""

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        for name, axes in self.rules.items():
            if name not in RULES:
                yield Problem(
                    f"rules.{name}",
                    "is not a logical axis",
                    value=axes,
                    accepted=", ".join(RULES),
                    hint=did_you_mean(name, RULES),
                )
            for axis in axes:
                if axis not in AXES:
                    yield Problem(
                        f"rules.{name}",
                        f"{axis!r} is not a mesh axis",
                        value=axes,
                        accepted=", ".join(AXES),
                        hint=did_you_mean(axis, AXES),
                    )
