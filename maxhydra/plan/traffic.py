"""Bytes that each device sends per step, by mesh axes: one function for each way in which an axis is used.

Counted as in plan/program.py: a ring all-gather or reduce-scatter of S bytes over n devices sends S (n - 1) / n, an
all-reduce twice that. A new axis or strategy is a new function in TRANSFERS.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from enum import Enum

import jax.numpy as jnp

from maxhydra.config.schema.hardware import DATA, REPLICA, STAGE, ContextStrategy
from maxhydra.config.schema.model import Dispatch, RematPolicy
from maxhydra.layers import DeltaSpec, MlaSpec, MoeSpec
from maxhydra.layers.short_convolution import ConvolutionSpec
from maxhydra.layers.ssm import SsmSpec
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
    schedule = case.schedule
    for transfer, is_staged in _weights_of_a_pass(case):
        # A stage gathers its weights for each microbatch.
        times = case.grad_accum * (schedule.ticks if schedule is not None and is_staged else 1)
        yield dataclasses.replace(transfer, bytes=transfer.bytes * times, calls=transfer.calls * times)


@per_mesh
def _weights_of_a_pass(case: Case) -> list[tuple[Transfer, bool]]:
    """Transfers of weights and gradients in one pass, added up by axes, and whether they belong to a stage."""
    totals: dict[tuple[str, tuple[str, ...], Phase, bool], tuple[float, float]] = {}
    for array in case.subject.weights:
        is_staged = STAGE in case.split(array)[1]
        for item in () if _is_table(array) else _weight(case, array):
            key = (item.what, item.axes, item.phase, is_staged)
            sent, calls = totals.get(key, (0.0, 0.0))
            # Small arrays are combined with their neighbors.
            totals[key] = (sent + item.bytes, max(calls, item.calls))
    return [
        (Transfer(what, axes, sent, calls, phase, Overlap.layer), is_staged)
        for (what, axes, phase, is_staged), (sent, calls) in totals.items()
    ]


def _weight(case: Case, array: Array) -> Iterator[Transfer]:
    """Gathers of one weight and the reduction of its gradient."""
    gathered, sharded = case.split(array)
    rest = tuple(axis for axis in case.batch_axes if axis not in gathered + sharded)
    layers = case.layers_on_device(array)
    size = case.used_bytes(array) * layers
    if gathered:
        sent = ring(case, gathered, size)
        yield Transfer("weights", gathered, sent, layers, Phase.forward, Overlap.layer)
        if array.is_block:
            # The head is used once, together with its gradient: there is no second gather.
            yield Transfer("weights", gathered, sent, layers, Phase.backward, Overlap.layer)
    if array.is_frozen:
        return
    if array.is_expert and gathered and rest and case.sharder.num_shards("experts") > 1:
        # The shard_map of layers/expert_parallel.py sums them over all axes at once; the shard is taken afterwards.
        axes = (*rest, *gathered)
        yield Transfer("gradients", axes, 2 * ring(case, axes, size), layers, Phase.backward, Overlap.layer)
        return
    if gathered:
        yield Transfer("gradients", gathered, ring(case, gathered, size), layers, Phase.backward, Overlap.layer)
    if rest:
        shards = math.prod(case.mesh[axis] for axis in gathered)
        sent = _reduction(case, array, rest) * size / shards
        yield Transfer("gradients", rest, sent, layers, Phase.backward, Overlap.layer)


def _reduction(case: Case, array: Array, axes: tuple[str, ...]) -> float:
    """Bytes sent per byte of a gradient that is summed: by an all-reduce, with ZeRO-1 by a reduce-scatter."""
    return ring(case, axes, 1.0) * (1 if case.layout.is_over_data(array) else 2)


def zero1_transfers(case: Case) -> Iterator[Transfer]:
    """data, with ZeRO-1: all weights are gathered at the start of a step.

    Layers' matrices are cast before that, and a head that is gathered over other axes too; the embedding is not.
    """
    arrays = [array for array in case.subject.weights if case.layout.is_over_data(array)]
    size = 0.0
    for array in arrays:
        is_cast = array.is_block or (case.split(array)[0] and not _is_table(array))
        size += case.compute_shard_bytes(array) if is_cast else case.shard_bytes(array)
    yield Transfer("weights", (DATA,), ring(case, (DATA,), size), len(arrays), Phase.forward, Overlap.none)


def replica_transfers(case: Case) -> Iterator[Transfer]:
    """replica: once per period the replicas' weights are averaged in float32; the mean per step."""
    diloco = case.config.train.diloco
    if case.mesh[REPLICA] == 1 or diloco.period is None:
        return
    sent = 2 * ring(case, (REPLICA,), outer_bytes(case)) / diloco.period
    calls = len(case.subject.trained) / diloco.period
    yield Transfer("outer step", (REPLICA,), sent, calls, Phase.backward, Overlap.none)


def outer_bytes(case: Case) -> float:
    """Bytes of a device's shards of all trained weights in float32."""
    return sum(case.shard_bytes(array) * FLOAT32 / array.dtype.itemsize for array in case.subject.trained)


def _is_table(array: Array) -> bool:
    """Whether a weight is looked up by token: an embedding that is not also the head."""
    return "vocab" in array.axes and not array.path.startswith("head")


def embedding_transfers(case: Case) -> Iterator[Transfer]:
    """Rows of the embedding: exchanged over the axes that split its width, scattered over those that split its rows."""
    for array in case.subject.weights:
        if not _is_table(array):
            continue
        gathered, sharded = case.split(array)
        rest = tuple(axis for axis in case.batch_axes if axis not in gathered + sharded)
        shards = math.prod(case.mesh[axis] for axis in sharded)
        rows = case.stream_tokens * array.shape[-1] * array.compute_bytes
        times, stored = case.grad_accum, case.shard_bytes(array) * FLOAT32 / array.dtype.itemsize
        for phase in Phase:
            if gathered:
                sent = ring(case, gathered, rows / shards) * times
                yield Transfer("embedding", gathered, sent, times, phase, Overlap.none, is_all_to_all=True)
            if sharded:
                yield Transfer("embedding", sharded, ring(case, sharded, rows) * times, times, phase, Overlap.none)
        if rest:
            sent = _reduction(case, array, rest) * stored * times
            yield Transfer("embedding", rest, sent, times, Phase.backward, Overlap.layer)
        if case.subject.spec.is_tied and "per_layer" not in array.path and gathered:
            sent = ring(case, gathered, case.used_bytes(array)) * times
            yield Transfer("weights", gathered, sent, times, Phase.forward, Overlap.layer)
            yield Transfer("gradients", gathered, sent, times, Phase.backward, Overlap.layer)


def tensor_transfers(case: Case) -> Iterator[Transfer]:
    """tensor: the residual stream, split along the length, is gathered before each branch and scattered after it."""
    axes = case.sharder.mesh_axes("act_heads")
    if not axes:
        return
    size = (
        case.stream_tokens * case.config.model.stream_dim * jnp.dtype(case.config.model.dtypes.compute.value).itemsize
    )
    sent = ring(case, axes, size)
    times = case.grad_accum * len(case.subject.spec.layers) * case.ticks
    policy = case.remat.policy
    # Recomputed: both gathers, and the sum of the attention branch, which the feed-forward reads, unless it is saved.
    again = 0 if policy is RematPolicy.none else 2
    is_summed_again = policy is RematPolicy.custom and "attention_out" not in case.remat.save
    again += policy is RematPolicy.full or is_summed_again
    for phase, calls in ((Phase.forward, 4 * times), (Phase.backward, (4 + again) * times)):
        yield Transfer("activations", axes, calls * sent, calls, phase, Overlap.none)
    for phase in Phase:
        yield Transfer("logits", axes, sent * case.grad_accum, case.grad_accum, phase, Overlap.none)
    # Every device has the latents of MLA; their gradients are partial sums over the heads.
    mixers = [(kind.mixer, count) for kind, count in case.subject.kinds if isinstance(kind.mixer, MlaSpec)]
    if latents := sum(count * (mixer.latent_dim + mixer.rope_dim) for mixer, count in mixers):
        times, share = case.grad_accum * case.ticks, latents / case.config.model.emb_dim
        calls = times * sum(count for _, count in mixers)
        yield Transfer("latents", axes, 2 * sent * share * times, calls, Phase.backward, Overlap.none)


def sequence_transfers(case: Case) -> Iterator[Transfer]:
    """sequence: heads are exchanged (ulysses), or keys and values travel to the devices that need them."""
    axes = case.sharder.mesh_axes("act_length")
    if not axes:
        return
    policy, saved = case.remat.policy, case.remat.save
    is_exchanged_again = policy is RematPolicy.custom and not {"query", "key", "value", "context"} <= set(saved)
    compute = jnp.dtype(case.config.model.dtypes.compute.value).itemsize
    shards = math.prod(case.mesh[axis] for axis in axes)
    for kind, count in case.subject.kinds:
        exchanges = _exchanges_heads(case, kind.mixer, shards)
        forward, backward = _numbers_sent(case, kind.mixer, shards)
        # The exchanged heads are saved by `minimal`, and by `custom` under the names of the heads.
        again = policy is not RematPolicy.none
        if exchanges:
            again = policy is RematPolicy.full or is_exchanged_again
        calls = count * case.grad_accum * (4 if exchanges else 2)
        for phase, sent in ((Phase.forward, forward), (Phase.backward, backward + again * forward)):
            size = sent * compute * count * case.grad_accum
            yield Transfer("keys", axes, size, calls, phase, Overlap.none, is_all_to_all=exchanges)


def _numbers_sent(case: Case, mixer: object, shards: int) -> tuple[float, float]:
    """Numbers that a device sends forward and backward for a layer over `sequence`; float32 gradients count twice."""
    (queries, keys, latents), tokens = _head_widths(case, mixer), case.stream_tokens
    if isinstance(mixer, DeltaSpec) and mixer.decay_rank is not None:
        # Queries, keys, values and decays are gathered in float32; their gradients are reduced.
        own = mixer.num_value_heads * (3 * mixer.key_dim + mixer.value_dim) / case.sharder.num_shards("act_heads")
        return 2 * tokens * (shards - 1) * own, 2 * tokens * (shards - 1) * own
    if isinstance(mixer, DeltaSpec):
        # kernels/gated_delta/over_length.py gathers each device's transition and change of the state, in float32.
        states = mixer.num_value_heads * mixer.key_dim * (mixer.key_dim + mixer.value_dim)
        sent = 2 * (tokens / (case.seq_len // shards)) * (shards - 1) * states / case.sharder.num_shards("act_heads")
        return sent, sent
    if isinstance(mixer, ConvolutionSpec):
        # The tokens before those of a device.
        sent = tokens / (case.seq_len // shards) * (mixer.taps - 1) * mixer.emb_dim / case.sharder.num_shards("act_mlp")
        return sent, sent
    if isinstance(mixer, SsmSpec):
        # Queries, keys and values are gathered in float32; their gradients are reduced.
        splits = case.sharder.num_shards("act_kv_heads") if mixer.num_groups > 1 else 1
        own = mixer.num_heads * mixer.head_dim / case.sharder.num_shards("act_heads")
        own += 2 * mixer.num_groups * mixer.state_dim / splits
        sent = 2 * tokens * (shards - 1) * own
        return sent, sent
    if _exchanges_heads(case, mixer, shards):
        # Queries, keys and values, and the output back; the same for the gradients.
        sent = tokens * (shards - 1) * (queries + keys) / shards
        if 3 * latents * shards > 2 * keys:
            return sent, sent
        # As layers/mla.py chooses: gathered latents, again for the gradient of the kernel, and their own gradients.
        sent = tokens * (shards - 1) * queries / shards
        gathered = tokens * (shards - 1) * latents
        return sent + gathered, sent + 2 * gathered
    own = case.seq_len // shards
    window = getattr(mixer, "window", None) or getattr(mixer, "chunk", None)
    if window is not None and case.config.mesh.context is not ContextStrategy.ring:
        # The tokens before those of a device, as kernels/attention/context.py counts them.
        sent = tokens * min(-(-(window - 1) // 128) * 128, case.seq_len - own) / own * keys
        return sent, sent
    if case.config.mesh.context is ContextStrategy.all_gather or getattr(mixer, "indexer", None):
        sent = tokens * (shards - 1) * latents
        return sent, 3 * sent
    sent = tokens * (shards - 1) * keys
    # Zigzag order moves queries, keys and the output; gradients of the keys take one step more, back to their device.
    order = tokens * (queries + keys)
    return sent + order, sent + 2 * tokens * shards * keys + order


def _exchanges_heads(case: Case, mixer: object, shards: int) -> bool:
    """Whether attention exchanges heads, as kernels/attention/context.py chooses."""
    strategy = case.config.mesh.context
    is_local = getattr(mixer, "window", None) or getattr(mixer, "chunk", None) or getattr(mixer, "indexer", None)
    if strategy is not ContextStrategy.auto:
        return strategy is ContextStrategy.ulysses
    heads = getattr(mixer, "num_heads", 0)
    return bool(heads) and not is_local and heads % (shards * case.sharder.num_shards("act_heads")) == 0


def _head_widths(case: Case, mixer: object) -> tuple[float, float, float]:
    """Numbers per token of a device's queries and outputs, of its keys and values, and of the latents of MLA.

    Without latents the last is that of keys and values.
    """
    heads: int = getattr(mixer, "num_heads", 0) or getattr(mixer, "num_value_heads", 0)
    tensor = case.sharder.num_shards("act_heads")
    latent = getattr(mixer, "latent_dim", None)
    if latent is not None:
        own: float = heads * (getattr(mixer, "key_dim", 0) + getattr(mixer, "value_dim", 0)) / tensor
        return own, own, float(latent + getattr(mixer, "rope_dim", 0))
    width: int = getattr(mixer, "head_dim", 0) or getattr(mixer, "key_dim", 0)
    kv_heads: int = getattr(mixer, "num_kv_heads", 0) or getattr(mixer, "num_key_heads", 0)
    keys = 2.0 * kv_heads * width / case.sharder.num_shards("act_kv_heads")
    return 2.0 * heads * width / tensor, keys, keys


def expert_rows(case: Case, spec: MoeSpec) -> float:
    """Routed rows that a device has buffers for: a multiple of an even load, or all that could be routed to it."""
    devices = case.sharder.num_shards("experts")
    even, buffer = case.stream_tokens * spec.router.top_k, case.config.model.expert_parallel.buffer
    most = devices * case.stream_tokens * min(spec.router.top_k, spec.experts.experts // devices)
    return even if devices == 1 else most if buffer is None else min(most, buffer * even)


def gathers_tokens(case: Case, spec: MoeSpec) -> bool:
    """Whether all tokens travel to all devices of the experts, as layers/expert_parallel.py chooses."""
    devices, dispatch = case.sharder.num_shards("experts"), case.config.model.expert_parallel.dispatch
    is_less = dispatch is Dispatch.auto and devices <= spec.router.top_k
    return devices > 1 and (dispatch is Dispatch.all_gather or is_less)


def expert_transfers(case: Case) -> Iterator[Transfer]:
    """expert: rows travel to the devices of their experts and back, or all tokens to all devices if that is less."""
    axes = case.sharder.mesh_axes("experts")
    if not axes or not case.subject.experts:
        return
    spec, layers, times = case.subject.experts[0], len(case.subject.experts), case.grad_accum
    devices = math.prod(case.mesh[axis] for axis in axes)
    gathers = gathers_tokens(case, spec)
    rows = case.stream_tokens * (devices - 1 if gathers else spec.router.top_k * (devices - 1) / devices)
    size = rows * spec.experts.emb_dim * jnp.dtype(case.config.model.dtypes.compute.value).itemsize
    # Tokens are sent again for the recomputed pass; outputs are not.
    recomputed = case.remat.policy is not RematPolicy.none
    for phase, passes in ((Phase.forward, 2), (Phase.backward, 2 + recomputed)):
        calls = passes * layers * times
        yield Transfer("tokens", axes, calls * size, calls, phase, Overlap.none, is_all_to_all=not gathers)


def stage_transfers(case: Case) -> Iterator[Transfer]:
    """stage: at every tick a stage passes on its microbatch, an input and an output of the pipeline; back likewise."""
    schedule = case.schedule
    if schedule is None:
        return
    compute = jnp.dtype(case.config.model.dtypes.compute.value).itemsize
    microbatch = case.stream_tokens * schedule.stages / schedule.microbatches
    size = microbatch * case.config.model.stream_dim * compute
    calls = 3 * schedule.ticks * case.grad_accum
    yield Transfer("microbatches", (STAGE,), calls * size, calls, Phase.forward, Overlap.none)
    yield Transfer("microbatches", (STAGE,), calls * size, calls, Phase.backward, Overlap.none)


TRANSFERS: tuple[Callable[[Case], Iterator[Transfer]], ...] = (
    weight_transfers,
    zero1_transfers,
    replica_transfers,
    embedding_transfers,
    tensor_transfers,
    sequence_transfers,
    expert_transfers,
    stage_transfers,
)
