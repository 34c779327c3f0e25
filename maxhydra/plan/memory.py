"""Bytes per device by kind, and the peak of a training step.

State is exact: shapes of the model and the optimizer, divided by the real sharding. Temporaries follow the points of a
step at which XLA's buffer assignment peaks: the loss, when logits exist next to all saved activations, the backward
pass of a layer, when its recomputed activations, gathered weights and their gradients exist, and with ZeRO-1 the start,
when all weights have been gathered.
"""

import dataclasses
from collections.abc import Iterable
from functools import lru_cache

import jax.numpy as jnp

from maxhydra.config.schema.hardware import REPLICA
from maxhydra.kernels import linear_cross_entropy
from maxhydra.plan.case import NOTHING_RECOMPUTED, Case, per_mesh
from maxhydra.plan.traffic import FLOAT32, expert_rows, gathers_tokens, outer_bytes

# Parts of Memory that always exist, and those that exist next to them at each point of a step.
STATE = ("weights", "optimizer", "outer", "batch")
POINTS = {
    "in the gather of the weights": ("cast_weights", "tables"),
    "at the loss": ("cast_weights", "gradients", "activations", "logits", "loss"),
    "in the backward pass": (
        "cast_weights",
        "gradients",
        "separate_gradients",
        "activations",
        "logits",
        "layer",
        "gathered",
    ),
}
# Bytes of the five int32 and float32 columns of a batch.
COLUMN_BYTES = 20


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: float
    optimizer: float
    cast_weights: float
    """The copy of the layers' matrices in the compute dtype."""
    gradients: float
    """Gradients of the layers, which the backward loop fills, and the sums of accumulated microbatches."""
    separate_gradients: float
    """Gradients of unrolled layers, each of which exists from its layer's backward pass on."""
    activations: float
    """Saved for the backward pass by all layers."""
    layer: float
    """Recomputed and intermediate activations of the layers in work."""
    gathered: float
    """Weights of the layers in work, gathered for use."""
    logits: float
    """Gradient of the logits, or of the head if the loss has chunks, which XLA keeps until after the layers."""
    loss: float
    """Logits, if their gradient is not written over them, the gathered head, and hidden states."""
    experts: float
    """Routed rows of the layer in work, part of `layer`."""
    batch: float
    tables: float = 0.0
    """ZeRO-1: embedding and head, gathered in the dtype in which they are stored, and the shards they come from."""
    outer: float = 0.0
    """DiLoCo: the shared weights next to those of the replica, and the momentum of the outer step."""
    host: float = 0.0
    """Optimizer state and weights in host memory (optimizer.offload*); not part of the others."""

    @property
    def state(self) -> float:
        return self.total(STATE)

    @property
    def temporaries(self) -> float:
        return self.total(POINTS[self.peak_point])

    @property
    def peak(self) -> float:
        return self.state + self.temporaries

    @property
    def peak_point(self) -> str:
        """The point of the step with the most temporaries, a key of POINTS."""
        return max(POINTS, key=lambda point: self.total(POINTS[point]))

    def total(self, parts: Iterable[str]) -> float:
        return sum(getattr(self, part) for part in parts)


@lru_cache(maxsize=8192)
def memory(case: Case) -> Memory:
    """Memory of a training step on each device."""
    accumulators = _accumulator_bytes(case) if case.grad_accum > 1 else 0
    stream = case.stream_tokens * case.config.model.stream_dim * _compute_bytes(case)
    layer, rows = _layer_work(case)
    in_work = _layers_in_work(case)
    gathered, gradient = _gathered_bytes(case)
    return Memory(
        weights=0.0 if case.config.optimizer.offload_weights else _weight_bytes(case),
        optimizer=0.0 if case.config.optimizer.offload else _moment_bytes(case),
        cast_weights=_cast_bytes(case),
        gradients=accumulators + (0.0 if _is_unrolled(case) else _gradient_bytes(case)),
        separate_gradients=_gradient_bytes(case) if _is_unrolled(case) else 0.0,
        activations=case.ticks * sum(count * case.saved_bytes(kind) for kind, count in case.subject.kinds),
        layer=in_work * (layer - rows + _gathered_stream_bytes(case)) + rows,
        gathered=in_work * gathered + gradient,
        logits=_head_gradient_bytes(case),
        loss=_loss_bytes(case, stream),
        experts=rows,
        batch=COLUMN_BYTES * case.stream_tokens * case.grad_accum,
        tables=_gathered_table_bytes(case),
        outer=_trained_bytes(case) + outer_bytes(case) if case.mesh[REPLICA] > 1 else 0.0,
        host=host_bytes(case, moments=1, weights=1),
    )


def _is_unrolled(case: Case) -> bool:
    """Whether one device runs the layers without a loop, whose gradients it would store in one array."""
    spec, platform = case.subject.spec, case.config.hardware.platform.value
    return case.devices == 1 and case.grad_accum == 1 and spec.unroll_on(platform, 1) == spec.repetitions


def _layers_in_work(case: Case) -> float:
    """Layers whose gathered weights and activations exist at the same time in the backward pass.

    The layers of one repetition of the pattern share a loop body, in which XLA gathers weights early and computes their
    gradients late: on average half of them are in work. Of several repetitions in a body, each is recomputed early.
    """
    spec = case.subject.spec
    repetitions = spec.unroll_on(case.config.hardware.platform.value, case.devices) if case.devices > 1 else 1
    return repetitions * (len(spec.pattern) + 1) / 2


def host_bytes(case: Case, *, moments: int, weights: int) -> float:
    """Bytes of optimizer state and weights in host memory, each times the given factor."""
    optimizer = case.config.optimizer
    stored = moments * _moment_bytes(case) if optimizer.offload else 0.0
    return stored + weights * _weight_bytes(case) if optimizer.offload_weights else stored


@per_mesh
def _weight_bytes(case: Case) -> float:
    return sum(map(case.local_bytes, case.subject.weights))


@per_mesh
def _moment_bytes(case: Case) -> float:
    return sum(map(case.local_bytes, case.subject.moments))


@per_mesh
def _trained_bytes(case: Case) -> float:
    return sum(map(case.local_bytes, case.subject.trained))


def _accumulator_bytes(case: Case) -> float:
    """Gradients of all micro-batches, in the dtype of the weights or in optimizer.grad_dtype."""
    dtype = case.config.optimizer.grad_dtype
    if dtype is None:
        return _trained_bytes(case)
    size = jnp.dtype(dtype.value).itemsize
    return sum(case.local_bytes(array) * size / array.dtype.itemsize for array in case.subject.trained)


def _compute_bytes(case: Case) -> int:
    return jnp.dtype(case.config.model.dtypes.compute.value).itemsize


@per_mesh
def _cast_bytes(case: Case) -> float:
    """Bytes of the sharded copy of the layers' matrices in the compute dtype; none of those that are stored in it."""
    arrays = [array for array in case.subject.weights if array.is_block and array.dtype.itemsize != array.compute_bytes]
    return sum(map(case.compute_shard_bytes, arrays))


@per_mesh
def _gradient_bytes(case: Case) -> float:
    """Sharded gradients of the layers in the dtype in which they use the weights, over `data` too with ZeRO-1."""
    trained = [array for array in case.subject.trained if array.is_block]
    return sum(case.local_bytes(array) * array.compute_bytes / array.dtype.itemsize for array in trained)


@per_mesh
def _gathered_table_bytes(case: Case) -> float:
    arrays = [array for array in case.subject.weights if not array.is_block and case.layout.is_over_data(array)]
    return sum(case.shard_bytes(array) + case.local_bytes(array) for array in arrays)


@per_mesh
def _gathered_bytes(case: Case) -> tuple[float, float]:
    """Weights of the largest layer, gathered over the axes that only store them, and gradients to be scattered.

    Of the matrices of all experts, the gradient of one exists at a time.
    """
    layers: dict[str, tuple[float, float]] = {}
    matrices = max((moe.experts.matrices for moe in case.subject.experts), default=1)
    for array in case.subject.weights:
        if array.is_block and array.is_matrix and case.split(array)[0]:
            name = "/".join(array.path.split("/")[:2])
            weights, gradient = layers.get(name, (0.0, 0.0))
            used = case.used_bytes(array)
            layers[name] = weights + used, gradient + (used / matrices if array.is_expert else 0.0)
    return max(layers.values(), key=sum, default=(0.0, 0.0))


def _gathered_stream_bytes(case: Case) -> float:
    """Inputs of both sublayers, gathered over a tensor-parallel group, and their gradients to be scattered."""
    if case.sharder.num_shards("act_stream_length") == case.sharder.num_shards("act_length"):
        return 0.0
    return 4 * case.stream_tokens * case.config.model.stream_dim * _compute_bytes(case)


def _loss_chunk(case: Case) -> int:
    chunk = case.loss_chunk
    return chunk if 0 < chunk < case.seq_len else case.seq_len


def _logits_bytes(case: Case, item_bytes: int) -> float:
    """Logits of one chunk of the loss."""
    tokens = case.stream_tokens * _loss_chunk(case) / case.seq_len
    return tokens * case.config.model.vocab_size / case.sharder.num_shards("act_vocab") * item_bytes


def _head_gradient_bytes(case: Case) -> float:
    """Bytes from which XLA computes the gradient of the head after the backward pass of the layers.

    Without chunks it is the gradient of the logits. A loop over chunks carries the gradient of the head in float32.
    """
    if _loss_chunk(case) == case.seq_len:
        return _logits_bytes(case, _compute_bytes(case))
    config = case.config.model
    return config.emb_dim * config.vocab_size / case.sharder.num_shards("act_vocab") * FLOAT32


def _loss_bytes(case: Case, stream: float) -> float:
    """What exists at the loss next to the gradient of the logits of all positions."""
    config, compute = case.config.model, _compute_bytes(case)
    logits = jnp.dtype(config.dtypes.logits.value).itemsize
    head = config.emb_dim * config.vocab_size / case.sharder.num_shards("act_vocab") * compute
    is_served = case.serves(linear_cross_entropy.BACKENDS["triton"], "batch", "length", "vocab")
    if _loss_chunk(case) < case.seq_len:
        return _logits_bytes(case, logits + compute) + head + 2 * stream
    if not is_served or logits != compute:
        return _logits_bytes(case, logits) + head + 2 * stream
    # The kernel writes the gradient over the logits. The head is freed before its gradient is computed, which is then
    # scattered; the gradient of the final norm is computed in float32.
    shards = case.sharder.num_shards("embed")
    return head + (head / shards if shards > 1 else 0.0) + 4 * stream


def _layer_work(case: Case) -> tuple[float, float]:
    """Bytes of the activations of the largest layer while it is in work, and of its routed rows among them."""
    sizes = [case.saved_bytes(kind, NOTHING_RECOMPUTED) for kind, _ in case.subject.kinds]
    rows = _row_bytes(case)
    return max(sizes) + max(0.0, rows), rows


def _row_bytes(case: Case) -> float:
    """Bytes by which buffers of routed rows and their gradients exceed the K rows of each token of a device."""
    if not case.subject.experts:
        return 0.0
    spec = case.subject.experts[0]
    extra = max(0.0, expert_rows(case, spec) - case.stream_tokens * spec.router.top_k)
    width = 2 * spec.experts.emb_dim + spec.experts.matrices * spec.experts.dim / case.sharder.num_shards("act_mlp")
    rows = 2 * extra * _compute_bytes(case) * width
    if not gathers_tokens(case, spec):
        return rows
    # Outputs of all gathered tokens and their gradient, in float32.
    tokens = case.stream_tokens * case.sharder.num_shards("experts")
    return rows + 2 * tokens * spec.experts.emb_dim * FLOAT32
