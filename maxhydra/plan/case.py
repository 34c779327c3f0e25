"""A training setup to plan: the model's weights and layers, the optimizer's state, and a mesh without devices.

`Subject` is independent of the mesh and built once; a `Case` adds mesh, remat policy and batch, and is cheap, so that
a search can try thousands.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh

from maxhydra import model, optim
from maxhydra.config import Config
from maxhydra.config.schema.hardware import AXES, DATA, REPLICA, STAGE, Mesh, Platform
from maxhydra.config.schema.model import RematPolicy
from maxhydra.kernels import rms_norm
from maxhydra.kernels.dispatch import Capability
from maxhydra.layers import MoeSpec
from maxhydra.model import flops_per_token
from maxhydra.model.block import BlockSpec, Remat
from maxhydra.model.decoder import BLOCKS, DecoderSpec
from maxhydra.plan.layers import HashedModel, LayerTrace, trace_layer
from maxhydra.sharding import AxisSizes, LogicalAxes, Sharder, axis_sizes, bytes_per_device, is_axes
from maxhydra.sharding.mesh import AXIS_TYPES
from maxhydra.sharding.pipeline import PipelineSchedule
from maxhydra.train import plan_states

# Weight dimensions that stay split in the matmul that uses them; the others are all-gathered for it.
SPLIT_IN_USE = ("layers", "heads", "kv_heads", "mlp", "vocab", "experts")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Array:
    """A weight or an array of the optimizer's state."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: LogicalAxes
    compute_bytes: int
    """Bytes of an element as layers use it, and of its gradient."""
    is_frozen: bool = False
    """Whether it is a weight that is not trained."""

    @property
    def layers(self) -> int:
        """Layers that are stacked in it."""
        return self.shape[0] if self.axes and self.axes[0] == "layers" else 1

    @property
    def is_block(self) -> bool:
        return self.path.split("/")[0] in BLOCKS

    @property
    def is_expert(self) -> bool:
        return "experts" in self.axes

    @property
    def is_matrix(self) -> bool:
        return sum(name != "layers" for name in self.axes) > 1


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """The model and training setup of a plan, without a mesh."""

    config: Config
    spec: DecoderSpec
    weights: tuple[Array, ...]
    moments: tuple[Array, ...]
    traced: HashedModel
    layouts: dict[tuple[AxisSizes, bool], "Layout"] = dataclasses.field(default_factory=dict)

    def layout(self, sizes: AxisSizes, *, shards_over_data: bool) -> "Layout":
        """The layout on a mesh, made once."""
        key = (sizes, shards_over_data)
        if key not in self.layouts:
            self.layouts[key] = Layout(sizes, self.config.mesh, shards_over_data=shards_over_data)
        return self.layouts[key]

    @classmethod
    def of(cls, config: Config) -> "Subject":
        states = plan_states(config, Sharder.single())
        decoder = states.model
        trainable, frozen = model.split_trainable(decoder.shapes)
        trainable_axes = model.split_trainable(decoder.axes)[0]
        state_shapes = jax.eval_shape(states.optimizer.transform.init, trainable)
        state_axes = optim.state_axes(states.optimizer, trainable, trainable_axes)
        compute = np.dtype(jax.numpy.dtype(config.model.dtypes.compute.value)).itemsize
        untrained = {array.path for array in _arrays(frozen, model.split_trainable(decoder.axes)[1], compute)}
        return cls(
            config=config,
            spec=DecoderSpec.of(config.model),
            weights=tuple(
                dataclasses.replace(array, is_frozen=array.path in untrained)
                for array in _arrays(decoder.shapes, decoder.axes, compute)
            ),
            moments=tuple(_arrays(state_shapes, state_axes, compute)),
            traced=HashedModel(config.model, config.quantization),
        )

    @cached_property
    def trained(self) -> list[Array]:
        return [array for array in self.weights if not array.is_frozen]

    @cached_property
    def kinds(self) -> list[tuple[BlockSpec, int]]:
        """Layer kinds and how many layers of each the model has, multi-token prediction included."""
        counts = Counter(kind.name for kind in self.spec.layers + self.spec.mtp)
        specs = {kind.name: kind for kind in self.spec.layers + self.spec.mtp}
        return [(specs[name], count) for name, count in counts.items()]

    @cached_property
    def experts(self) -> tuple[MoeSpec, ...]:
        """The mixture of every layer that has one."""
        found = [getattr(kind.parallel_moe, "moe", kind.feed_forward) for kind in self.spec.layers]
        return tuple(spec for spec in found if isinstance(spec, MoeSpec))

    @cached_property
    def step_flops(self) -> float:
        """FLOPs per token of one training step, as the MFU counts them."""
        config = self.config
        return flops_per_token(config.model, config.train.seq_len, has_adapter=config.adapter.is_enabled)

    @cached_property
    def forward_flops(self) -> "ForwardFlops":
        """FLOPs per token of one forward pass."""
        config, length = self.config.model, self.config.train.seq_len
        mixing = sum(count * (kind.mixer.forward_flops(length) - _projection_flops(kind)) for kind, count in self.kinds)
        layers = sum(count * kind.forward_flops(length) for kind, count in self.kinds) - mixing
        return ForwardFlops(
            layers=layers,
            mixing=mixing,
            head=2.0 * config.emb_dim * config.vocab_size * (1 + len(self.spec.mtp)),
            routed=sum(moe.forward_flops() for moe in self.experts),
        )


@dataclasses.dataclass(frozen=True)
class ForwardFlops:
    """FLOPs per token of one forward pass."""

    layers: float
    """Projections of all layers."""
    mixing: float
    """Attention and other mixing of tokens."""
    head: float
    routed: float
    """Experts and routers, part of `layers`."""


def _projection_flops(kind: BlockSpec) -> float:
    """FLOPs of a mixer's projections: those of a sequence of one token, whose attention costs next to nothing."""
    return kind.mixer.forward_flops(1)


def _arrays(shapes: Any, axes: Any, compute: int) -> list[Array]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    names = jax.tree.leaves(axes, is_leaf=is_axes)
    arrays = []
    for (keys, leaf), leaf_axes in zip(leaves, names, strict=True):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        array = Array(path, leaf.shape, np.dtype(leaf.dtype), leaf_axes, leaf.dtype.itemsize)
        is_cast = array.is_matrix and "router" not in path
        arrays.append(dataclasses.replace(array, compute_bytes=compute) if is_cast else array)
    return arrays


class Layout:
    """How the arrays of a subject are sharded over one mesh; shared by all cases with this mesh."""

    def __init__(self, sizes: AxisSizes, config: Mesh, *, shards_over_data: bool):
        self.shards_over_data = shards_over_data
        mesh = AbstractMesh(sizes.total, AXES, axis_types=AXIS_TYPES)
        self.sharder = Sharder.from_config(config, mesh)
        self.mesh = dict(zip(AXES, sizes.total, strict=True))
        self.results: dict[Any, Any] = {}
        """Results of functions that depend on the mesh alone (`per_mesh`)."""
        self._stored: dict[Any, tuple[int, bool]] = {}
        self._split: dict[LogicalAxes, tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def local_bytes(self, array: Array) -> int:
        """Bytes of the largest shard of a stored array."""
        return self._stored_shard(array)[0]

    def is_over_data(self, array: Array) -> bool:
        """Whether only ZeRO-1 shards an array over data, so that it is gathered over it for use."""
        return self._stored_shard(array)[1]

    def _stored_shard(self, array: Array) -> tuple[int, bool]:
        """Bytes of the largest shard, and whether it is one of ZeRO-1; as StateFactory.spec. Once per kind of array."""
        key = (array.axes, array.shape, array.dtype.itemsize, array.is_frozen)
        if key not in self._stored:
            spec = usual = self.sharder.dividing_spec(array.axes, array.shape)
            if self.shards_over_data and not array.is_frozen:
                spec = self.sharder.spec_over_data(array.axes, array.shape)
            self._stored[key] = bytes_per_device(array.shape, array.dtype, spec, self.sharder.mesh), spec != usual
        return self._stored[key]

    def split(self, array: Array) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Mesh axes over which a weight is gathered for use, and those over which it stays split."""
        if array.axes not in self._split:
            gathered: list[str] = []
            unchanged: list[str] = []
            for name, entry in zip(array.axes, self.sharder.spec(array.axes), strict=True):
                axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
                (unchanged if name in SPLIT_IN_USE else gathered).extend(axes)
            self._split[array.axes] = tuple(gathered), tuple(unchanged)
        return self._split[array.axes]


@dataclasses.dataclass(frozen=True)
class Case:
    """A subject on a mesh, with a remat policy and a batch."""

    subject: Subject
    sizes: AxisSizes
    remat: Remat
    rows: float
    """Sequences per device in one forward pass; a fraction if several devices share a sequence."""
    grad_accum: int
    loss_chunk: int = 0
    """Positions per chunk of the loss; 0: no chunks."""
    shards_over_data: bool = False
    """ZeRO-1: weights and moments are sharded over `data` too."""

    @classmethod
    def of(cls, subject: Subject, *, devices: int, slices: int) -> "Case":
        """The case of the subject's own config; ConfigError if its mesh does not have this many devices."""
        config = subject.config
        return cls(
            subject=subject,
            sizes=axis_sizes(config.mesh, devices=devices, slices=slices),
            remat=Remat.of(config.model.remat),
            rows=config.train.per_device_batch_size,
            grad_accum=config.train.grad_accum,
            loss_chunk=config.train.chunk,
            shards_over_data=config.mesh.shard_state_over_data,
        )

    @property
    def config(self) -> Config:
        return self.subject.config

    @cached_property
    def layout(self) -> Layout:
        return self.subject.layout(self.sizes, shards_over_data=self.shards_over_data)

    @property
    def sharder(self) -> Sharder:
        return self.layout.sharder

    @property
    def mesh(self) -> dict[str, int]:
        return self.layout.mesh

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.total)

    @property
    def seq_len(self) -> int:
        return self.config.train.seq_len

    @property
    def tokens(self) -> float:
        """Tokens per device in one forward pass, each counted on one device only."""
        return self.rows * self.seq_len

    @property
    def stream_tokens(self) -> float:
        """Tokens whose residual stream a device holds: those of its batch and sequence shard."""
        shards = self.sharder.num_shards("act_batch") * self.sharder.num_shards("act_length")
        return self.tokens * self.devices / shards

    @property
    def step_tokens(self) -> float:
        """Tokens of one optimizer step on all devices."""
        return self.tokens * self.devices * self.grad_accum

    @property
    def schedule(self) -> PipelineSchedule | None:
        """The schedule of the pipeline; None without stages."""
        if self.mesh[STAGE] == 1:
            return None
        return self.sharder.pipeline_schedule(round(self.tokens * self.devices / self.seq_len))

    @property
    def ticks(self) -> float:
        """Runs of a stage per microbatch: more than one, because stages are idle while the pipeline fills."""
        schedule = self.schedule
        return 1.0 if schedule is None else schedule.ticks / (schedule.microbatches * schedule.repeats)

    def layers_on_device(self, array: Array) -> float:
        """Layers of a stacked weight that a device runs: those of its stage."""
        return array.layers / (self.mesh[STAGE] if STAGE in self.split(array)[1] else 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes over which gradients are summed: DiLoCo replicas keep theirs."""
        axes = self.sharder.mesh_axes("act_batch") + self.sharder.mesh_axes("act_length")
        return tuple(axis for axis in axes if axis != REPLICA)

    def serves(self, backend: Capability[Any], *dimensions: str) -> bool:
        """Whether a GPU kernel serves an operation whose operands have these dimensions (kernels/placement.py)."""
        split = [name for name in dimensions if self.sharder.num_shards(f"act_{name}") > 1]
        is_supported = backend.splits is None or set(split) <= set(backend.splits)
        return self.config.hardware.platform is Platform.gpu and is_supported

    def local_bytes(self, array: Array) -> int:
        return self.layout.local_bytes(array)

    def shard_bytes(self, array: Array) -> float:
        """Bytes of an array's shard as the forward pass reads it: that of ZeRO-1 gathered over `data`."""
        return self.local_bytes(array) * (self.mesh[DATA] if self.layout.is_over_data(array) else 1)

    def compute_shard_bytes(self, array: Array) -> float:
        """As `shard_bytes`, in the compute dtype."""
        return self.shard_bytes(array) * array.compute_bytes / array.dtype.itemsize

    def split(self, array: Array) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Mesh axes over which a weight is gathered for use, and those over which it stays split."""
        return self.layout.split(array)

    def used_bytes(self, array: Array) -> float:
        """Bytes of a weight of one layer on a device while the layer uses it, in the compute dtype."""
        shards = math.prod(self.mesh[axis] for axis in self.split(array)[1] if axis != STAGE)
        return math.prod(array.shape) / array.layers * array.compute_bytes / shards

    def trace(self, kind: BlockSpec, policy: Remat | None = None) -> LayerTrace:
        # Kernels of the norms save fewer residuals than XLA, whose residuals are the same on every platform.
        platform = "gpu" if self.serves(rms_norm.BACKENDS["triton"], "batch", "length") else "cpu"
        remat = (policy or self.remat).on(self.sharder)
        return trace_layer(self.subject.traced, kind.name, remat, platform=platform)

    def saved_bytes(self, kind: BlockSpec, policy: Remat | None = None) -> float:
        """Bytes of activations that one layer of this kind saves on a device."""
        rows = self.stream_tokens / self.seq_len
        streams = self.sharder.num_shards("act_stream_length") // self.sharder.num_shards("act_length")
        splits = self.sharder.num_shards("act_mlp")
        return self.trace(kind, policy).bytes(rows=rows, length=self.seq_len, splits=splits, streams=streams)


def per_mesh(function: Callable[..., R]) -> Callable[..., R]:
    """Compute a function of a case and hashable arguments once for each mesh: it must not depend on anything else."""

    @wraps(function)
    def cached(case: Case, *args: Any) -> R:
        key, results = (function.__qualname__, *args), case.layout.results
        if key not in results:
            results[key] = function(case, *args)
        found: R = results[key]
        return found

    return cached


NOTHING_RECOMPUTED = Remat(RematPolicy.none, (), ())
