"""Bytes per device by kind, and the peak of a training step.

State is exact: shapes of the model and the optimizer, divided by the real sharding. Temporaries follow the two points
of a step at which XLA's buffer assignment peaks: the loss, when logits exist next to all saved activations, and the
backward pass of a layer, when its recomputed activations, gathered weights and their gradients exist.
"""

import dataclasses

import jax.numpy as jnp

from maxhydra.kernels import linear_cross_entropy
from maxhydra.plan.case import NOTHING_RECOMPUTED, Case, per_mesh
from maxhydra.plan.traffic import FLOAT32, expert_rows, gathers_tokens

# Share of a layer's activations that exist at once while its backward pass runs, from compiled steps for H200.
LIVE_SHARE = 0.9
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
    activations: float
    """Saved for the backward pass by all layers."""
    layer: float
    """Recomputed and intermediate activations of the layer in work."""
    gathered: float
    """Weights of one layer, gathered for use."""
    loss: float
    """Logits and their gradient, and the gathered head."""
    experts: float
    """Routed rows of the layer in work, part of `layer`."""
    batch: float

    @property
    def state(self) -> float:
        return self.weights + self.optimizer + self.batch

    @property
    def at_loss(self) -> float:
        return self.cast_weights + self.activations + self.loss

    @property
    def at_backward(self) -> float:
        return self.cast_weights + self.activations + self.layer + self.gathered + self.gradients

    @property
    def temporaries(self) -> float:
        return max(self.at_loss, self.at_backward)

    @property
    def peak(self) -> float:
        return self.state + self.temporaries


def memory(case: Case) -> Memory:
    """Memory of a training step on each device."""
    accumulators = _trained_bytes(case) if case.grad_accum > 1 else 0
    stream = case.stream_tokens * case.config.model.emb_dim * _compute_bytes(case)
    layer, rows = _layer_work(case)
    return Memory(
        weights=_weight_bytes(case),
        optimizer=_moment_bytes(case),
        cast_weights=_cast_bytes(case),
        gradients=accumulators + _gradient_bytes(case),
        activations=case.ticks * sum(count * case.saved_bytes(kind) for kind, count in case.subject.kinds),
        layer=layer,
        gathered=_gathered_bytes(case),
        loss=_loss_bytes(case) + 2 * stream + accumulators,
        experts=rows,
        batch=COLUMN_BYTES * case.stream_tokens * case.grad_accum,
    )


@per_mesh
def _weight_bytes(case: Case) -> float:
    return sum(map(case.local_bytes, case.subject.weights))


@per_mesh
def _moment_bytes(case: Case) -> float:
    return sum(map(case.local_bytes, case.subject.moments))


@per_mesh
def _trained_bytes(case: Case) -> float:
    return sum(map(case.local_bytes, case.subject.trained))


def _compute_bytes(case: Case) -> int:
    return jnp.dtype(case.config.model.dtypes.compute.value).itemsize


@per_mesh
def _cast_bytes(case: Case) -> float:
    """Bytes of the sharded copy of the layers' matrices in the compute dtype; none of those that are stored in it."""
    arrays = [array for array in case.subject.weights if array.is_block and array.dtype.itemsize != array.compute_bytes]
    return sum(case.local_bytes(array) * array.compute_bytes / array.dtype.itemsize for array in arrays)


@per_mesh
def _gradient_bytes(case: Case) -> float:
    """Sharded gradients in the dtype in which layers use the weights."""
    trained = case.subject.trained
    return sum(case.local_bytes(array) * array.compute_bytes / array.dtype.itemsize for array in trained)


@per_mesh
def _gathered_bytes(case: Case) -> float:
    """Weights of the largest layer, gathered over the axes that only store them."""
    layers: dict[str, float] = {}
    for array in case.subject.weights:
        if array.is_block and array.is_matrix and case.split(array)[0]:
            name = "/".join(array.path.split("/")[:2])
            # The gradient of all experts exists before it is scattered; dense ones are scattered one by one.
            layers[name] = layers.get(name, 0.0) + case.used_bytes(array) * (2 if array.is_expert else 1)
    return max(layers.values(), default=0.0)


def _loss_bytes(case: Case) -> float:
    """Logits in their dtype, their gradient in the compute dtype, and the head."""
    config, train = case.config.model, case.config.train
    chunk = train.loss_chunk if 0 < train.loss_chunk < case.seq_len else case.seq_len
    tokens = case.stream_tokens * chunk / case.seq_len
    vocabulary = config.vocab_size / case.sharder.num_shards("act_vocab")
    logits = jnp.dtype(config.dtypes.logits.value).itemsize
    head = config.emb_dim * vocabulary * _compute_bytes(case)
    is_served = case.serves(linear_cross_entropy.BACKENDS["triton"], "batch", "length", "vocab")
    is_whole = chunk == case.seq_len
    # On all positions at once the kernel writes the gradient over the logits, next to the head and its gradient; a
    # loop over chunks carries the gradient in float32.
    in_place = is_whole and is_served and logits == _compute_bytes(case)
    heads = 3 if not is_whole else 2 if in_place else 1
    return tokens * vocabulary * (logits + (0 if in_place else _compute_bytes(case))) + heads * head


def _layer_work(case: Case) -> tuple[float, float]:
    """Bytes of the activations of the largest layer while it is in work, and of its routed rows among them."""
    sizes = [LIVE_SHARE * case.saved_bytes(kind, NOTHING_RECOMPUTED) for kind, _ in case.subject.kinds]
    rows = _row_bytes(case)
    return max(sizes) + max(0.0, rows), rows


def _row_bytes(case: Case) -> float:
    """Bytes by which buffers of routed rows and their gradients exceed the K rows of each token of a device."""
    if not case.subject.experts:
        return 0.0
    spec = case.subject.experts[0]
    extra = max(0.0, expert_rows(case, spec) - case.stream_tokens * spec.router.top_k)
    width = 2 * spec.experts.emb_dim + 3 * spec.experts.dim / case.sharder.num_shards("act_mlp")
    rows = 2 * extra * _compute_bytes(case) * width
    if not gathers_tokens(case, spec):
        return rows
    # Outputs of all gathered tokens and their gradient, in float32.
    tokens = case.stream_tokens * case.sharder.num_shards("experts")
    return rows + 2 * tokens * spec.experts.emb_dim * FLOAT32
