"""Bytes that each device sends per step, by mesh axes: one function for each way in which an axis is used.

Counted as in plan/program.py: a ring all-gather or reduce-scatter of S bytes over n devices sends S (n - 1) / n, an
all-reduce twice that. A new axis or strategy is a new function in TRANSFERS.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from enum import Enum

import jax.numpy as jnp

from maxhydra.config.schema.model import RematPolicy
from maxhydra.layers import MoeSpec
from maxhydra.plan.case import Array, Case, per_mesh

FLOAT32 = 4


class Overlap(Enum):
    """What a transfer can run at the same time as."""

    layer = "layer"
    """Compute of a neighboring layer: weights are gathered ahead, gradients are reduced behind."""
    none = "none"
    """Nothing: the layer needs its result to go on."""


class Phase(Enum):
    forward = "forward"
    backward = "backward"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Bytes that a device sends over some mesh axes per step."""

    what: str
    axes: tuple[str, ...]
    bytes: float
    calls: float
    """Collectives per step."""
    phase: Phase
    overlap: Overlap
    is_all_to_all: bool = False


def transfers(case: Case) -> list[Transfer]:
    """All transfers of a step."""
    found = [transfer for model in TRANSFERS for transfer in model(case)]
    return [transfer for transfer in found if transfer.bytes > 0]


def bytes_by_axes(found: list[Transfer]) -> dict[tuple[str, ...], float]:
    """Bytes sent per device and step over each set of axes."""
    totals: dict[tuple[str, ...], float] = {}
    for transfer in found:
        totals[transfer.axes] = totals.get(transfer.axes, 0.0) + transfer.bytes
    return totals


def ring(case: Case, axes: tuple[str, ...], size: float) -> float:
    """Bytes sent to gather or scatter `size` bytes over these axes."""
    devices = math.prod(case.mesh[axis] for axis in axes)
    return size * (devices - 1) / devices


def weight_transfers(case: Case) -> Iterator[Transfer]:
    """fsdp, and the other axes that store weights: gathered per layer and pass; gradients scattered, then reduced."""
    for transfer in _weights_of_a_pass(case):
        times = case.grad_accum
        yield dataclasses.replace(transfer, bytes=transfer.bytes * times, calls=transfer.calls * times)


@per_mesh
def _weights_of_a_pass(case: Case) -> list[Transfer]:
    """Transfers of weights and gradients in one forward and backward pass, added up by axes."""
    totals: dict[tuple[str, tuple[str, ...], Phase], tuple[float, float]] = {}
    for array in case.subject.weights:
        for item in () if _is_table(array) else _weight(case, array):
            key = (item.what, item.axes, item.phase)
            sent, calls = totals.get(key, (0.0, 0.0))
            # Small arrays are combined with their neighbors.
            totals[key] = (sent + item.bytes, max(calls, item.calls))
    return [
        Transfer(what, axes, sent, calls, phase, Overlap.layer) for (what, axes, phase), (sent, calls) in totals.items()
    ]


def _weight(case: Case, array: Array) -> Iterator[Transfer]:
    """Gathers of one weight and the reduction of its gradient."""
    gathered, kept = case.split(array)
    rest = tuple(axis for axis in case.batch_axes if axis not in gathered + kept)
    size, layers = case.used_bytes(array) * array.layers, array.layers
    if gathered:
        sent = ring(case, gathered, size)
        yield Transfer("weights", gathered, sent, layers, Phase.forward, Overlap.layer)
        if array.is_block:
            # The head is used once, together with its gradient: there is no second gather.
            yield Transfer("weights", gathered, sent, layers, Phase.backward, Overlap.layer)
    if array.path in case.subject.frozen:
        return
    if gathered:
        yield Transfer("gradients", gathered, ring(case, gathered, size), layers, Phase.backward, Overlap.layer)
    if rest:
        shards = math.prod(case.mesh[axis] for axis in gathered)
        yield Transfer("gradients", rest, 2 * ring(case, rest, size / shards), layers, Phase.backward, Overlap.layer)


def _is_table(array: Array) -> bool:
    """Whether a weight is looked up by token: an embedding that is not also the head."""
    return "vocab" in array.axes and not array.path.startswith("head")


def embedding_transfers(case: Case) -> Iterator[Transfer]:
    """Rows of the embedding: exchanged over the axes that split its width, summed over those that split its rows."""
    spec = case.subject.spec
    for array in case.subject.weights:
        if not _is_table(array):
            continue
        gathered, kept = case.split(array)
        width, vocabulary = array.shape[-1], array.shape[0]
        rows, times = case.stream_tokens * width, case.grad_accum
        table = vocabulary * width / math.prod(case.mesh[axis] for axis in kept)
        is_exchanged = table >= rows
        if gathered and is_exchanged:
            sent = ring(case, gathered, rows * FLOAT32) * times
            yield Transfer("embedding", gathered, sent, times, Phase.forward, Overlap.none, is_all_to_all=True)
        elif gathered:
            sent = ring(case, gathered, table * FLOAT32) * times
            yield Transfer("embedding", gathered, sent, times, Phase.forward, Overlap.layer)
        if kept:
            sent = 2 * ring(case, kept, rows * FLOAT32) * times
            yield Transfer("embedding", kept, sent, times, Phase.forward, Overlap.none)
        yield from _embedding_gradient(case, array, is_exchanged)
        if spec.is_tied and "per_layer" not in array.path:
            head = case.used_bytes(array)
            if gathered:
                sent = ring(case, gathered, head) * times
                yield Transfer("weights", gathered, sent, times, Phase.forward, Overlap.layer)
                yield Transfer("gradients", gathered, sent, times, Phase.backward, Overlap.layer)


def _embedding_gradient(case: Case, array: Array, is_exchanged: bool) -> Iterator[Transfer]:
    """Gradient of an embedding: rows go back to the shards of the width; replicas add up their tables."""
    gathered, kept = case.split(array)
    rest = tuple(axis for axis in case.batch_axes if axis not in gathered + kept)
    rows, times = case.stream_tokens * array.shape[-1] * array.compute_bytes, case.grad_accum
    stored = math.prod(case.mesh[axis] for axis in gathered + kept)
    table = math.prod(array.shape) * FLOAT32 / stored
    if gathered and rest:
        axes = tuple(axis for axis in case.mesh if axis in gathered + rest)
        others = math.prod(case.mesh[axis] for axis in axes) - 1
        yield Transfer("embedding", axes, others * rows * times, times, Phase.backward, Overlap.none)
    elif gathered and is_exchanged:
        sent = ring(case, gathered, rows) * times
        yield Transfer("embedding", gathered, sent, times, Phase.backward, Overlap.none, is_all_to_all=True)
    elif gathered:
        sent = ring(case, gathered, table * stored) * times
        yield Transfer("embedding", gathered, sent, times, Phase.backward, Overlap.layer)
    if rest:
        yield Transfer("embedding", rest, 2 * ring(case, rest, table) * times, times, Phase.backward, Overlap.layer)


def tensor_transfers(case: Case) -> Iterator[Transfer]:
    """tensor: the output of both branches of a layer is summed over devices, and so are their input gradients."""
    axes = case.sharder.mesh_axes("act_heads")
    if not axes:
        return
    size = case.stream_tokens * case.config.model.emb_dim * jnp.dtype(case.config.model.dtypes.compute.value).itemsize
    sent = 2 * ring(case, axes, size) * case.grad_accum
    layers = len(case.subject.spec.layers)
    # The sum of the attention branch is an input of the recomputed feed-forward; that of the feed-forward is not.
    recomputed = int(case.remat.policy is RematPolicy.full or "attention_out" not in case.remat.save)
    recomputed *= case.remat.policy in (RematPolicy.full, RematPolicy.custom)
    times = case.grad_accum * layers
    yield Transfer("activations", axes, 2 * layers * sent, 2 * times, Phase.forward, Overlap.none)
    backward = 2 + recomputed
    yield Transfer("activations", axes, backward * layers * sent, backward * times, Phase.backward, Overlap.none)
    yield Transfer("logits", axes, sent, case.grad_accum, Phase.backward, Overlap.none)


def sequence_transfers(case: Case) -> Iterator[Transfer]:
    """sequence: keys and values of a layer are gathered, and their gradients scattered."""
    axes = case.sharder.mesh_axes("act_length")
    if not axes:
        return
    times = case.grad_accum * (1 if case.remat.policy is RematPolicy.none else 2)
    compute = jnp.dtype(case.config.model.dtypes.compute.value).itemsize
    shards = math.prod(case.mesh[axis] for axis in axes)
    for kind, count in case.subject.kinds:
        width = _key_width(case, kind.mixer)
        size = case.stream_tokens * shards * width * compute * count
        sent = ring(case, axes, size)
        yield Transfer("keys", axes, sent * case.grad_accum, count, Phase.forward, Overlap.none)
        yield Transfer("keys", axes, sent * times, count, Phase.backward, Overlap.none)


def _key_width(case: Case, mixer: object) -> float:
    """Numbers per token that are gathered: keys and values of a device's heads, or the latent of MLA."""
    latent = getattr(mixer, "latent_dim", None)
    if latent is not None:
        return float(latent + getattr(mixer, "rope_dim", 0))
    heads = getattr(mixer, "num_kv_heads", None) or getattr(mixer, "num_key_heads", 0)
    width = getattr(mixer, "head_dim", None) or getattr(mixer, "key_dim", 0)
    return 2.0 * heads * width / case.sharder.num_shards("act_kv_heads")


def expert_rows(case: Case, spec: MoeSpec) -> float:
    """Routed rows that a device holds in buffers: K for each token of all devices that share the experts."""
    holders = case.sharder.num_shards("experts")
    return case.stream_tokens * spec.router.top_k * holders


def expert_transfers(case: Case) -> Iterator[Transfer]:
    """expert: tokens are gathered to the devices of all experts, and their outputs scattered in float32."""
    axes = case.sharder.mesh_axes("experts")
    if not axes or not case.subject.experts:
        return
    layers, times = len(case.subject.experts), case.grad_accum
    shards = math.prod(case.mesh[axis] for axis in axes)
    compute = jnp.dtype(case.config.model.dtypes.compute.value).itemsize
    tokens = ring(case, axes, shards * case.stream_tokens * case.config.model.emb_dim)
    recomputed = case.remat.policy is not RematPolicy.none
    yield Transfer(
        "tokens", axes, layers * times * tokens * (compute + FLOAT32), 2 * layers * times, Phase.forward, Overlap.none
    )
    sent = layers * times * tokens * compute * (2 + recomputed)
    yield Transfer("tokens", axes, sent, (2 + recomputed) * layers * times, Phase.backward, Overlap.none)


TRANSFERS: tuple[Callable[[Case], Iterator[Transfer]], ...] = (
    weight_transfers,
    embedding_transfers,
    tensor_transfers,
    sequence_transfers,
    expert_transfers,
)
