"""Step time: compute by its bounds, transfers by the links they cross, and what of them is hidden behind compute.

Rates are shares of the vendor's peaks. Those of GPUs are fitted to our measurements on one H200 (bench/plan_check.py);
those of links and TPUs are assumptions, since nothing was measured over several nodes or on a TPU.
"""

import dataclasses
import math

import jax.numpy as jnp

from maxhydra.config.schema.hardware import AXES, Platform
from maxhydra.config.schema.model import RematPolicy
from maxhydra.config.schema.optimizer import OptimizerKind
from maxhydra.config.schema.quantization import QuantizationKind
from maxhydra.plan.case import NOTHING_RECOMPUTED, Case, per_mesh
from maxhydra.plan.memory import host_bytes
from maxhydra.plan.traffic import FLOAT32, Overlap, Phase, Transfer, transfers

# Shares of the peak matmul rate that projections and attention reach, and of the peak memory bandwidth.
MATMUL_RATE = {Platform.gpu: 0.69, Platform.tpu: 0.72}
FLOAT8_RATE = 0.58
ATTENTION_RATE = {Platform.gpu: 0.45, Platform.tpu: 0.45}
MEMORY_RATE = 0.8
# Reads and writes of every activation of a layer, over all elementwise operations of forward and backward pass.
# With float8, operands of matmuls are also scaled, cast and transposed.
ELEMENTWISE_PASSES, FLOAT8_PASSES = 2.5, 5.0
# A factored optimizer also reads and writes float32 updates of the size of the weights.
FACTORED_PASSES = 6
# Share of a link's rate that collectives reach, and seconds to start one, per doubling of its devices.
LINK_RATE = 0.8
START_SECONDS = 6e-6
# Share of a layer's compute behind which transfers can hide.
HIDEABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Compute:
    """Seconds of compute of one step on each device."""

    matmul: float
    attention: float
    elementwise: float
    optimizer: float
    recomputed: float
    """Matmuls and attention that run a second time; not part of the others."""
    host: float
    """Copies of offloaded optimizer state and weights from host memory and back."""

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.optimizer + self.recomputed + self.host


@dataclasses.dataclass(frozen=True)
class LinkTime:
    """Seconds of the transfers over one set of mesh axes."""

    axes: tuple[str, ...]
    bytes: float
    near_bytes: float
    """Bytes over links within a node (GPU) or a slice (TPU)."""
    far_bytes: float
    """Bytes over the network between nodes or slices."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes."""

    compute: Compute
    links: tuple[LinkTime, ...]
    exposed_weights: float
    """Seconds of gathers and reductions of weights that compute does not hide."""
    exposed_activations: float
    """Seconds of transfers that a layer waits for."""
    tokens_per_second: float
    mfu: float

    @property
    def seconds(self) -> float:
        return self.compute.total + self.exposed_weights + self.exposed_activations


def step_time(case: Case, found: list[Transfer] | None = None) -> StepTime | None:
    """Estimate of the step time, given its transfers; None if the hardware option lacks peak rates."""
    hardware = case.config.hardware
    if not hardware.peak_tflops.get(case.config.model.dtypes.compute.value) or not hardware.bandwidth_gb_s:
        return None
    compute = compute_time(case)
    found = transfers(case) if found is None else found
    links = link_times(case, found)
    blocking = sum(_seconds(case, item) for item in found if item.overlap is Overlap.none)
    hidden = {phase: _hideable(case, compute, phase) for phase in Phase}
    exposed = 0.0
    for phase in Phase:
        items = [item for item in found if item.overlap is Overlap.layer and item.phase is phase]
        exposed += max(0.0, sum(_seconds(case, item) for item in items) - hidden[phase])
    total = compute.total + exposed + blocking
    tokens = case.step_tokens / total
    peak = hardware.mfu_peak(case.config.model.dtypes.compute.value, case.config.quantization)
    assert peak is not None
    mfu = tokens * case.subject.step_flops / (peak[1] * 1e12 * case.devices)
    return StepTime(compute, tuple(links), exposed, blocking, tokens, mfu)


def compute_time(case: Case) -> Compute:
    """Seconds of compute of one step."""
    config, hardware = case.config, case.config.hardware
    peak = hardware.peak_tflops[config.model.dtypes.compute.value] * 1e12
    rate = peak * MATMUL_RATE.get(hardware.platform, 0.5)
    attention_rate = peak * ATTENTION_RATE.get(hardware.platform, 0.3)
    tokens = case.tokens * case.grad_accum
    bandwidth = (hardware.bandwidth_gb_s or 1.0) * 1e9 * MEMORY_RATE
    flops = case.subject.forward_flops
    layer_rate = _layer_rate(case, rate)
    again = _recomputed(case)
    # Stages repeat their work while the pipeline fills and drains.
    matmul = _weight_passes(case) * tokens * (case.ticks * flops.layers / layer_rate + flops.head / rate)
    attention = 3 * tokens * case.ticks * flops.mixing / attention_rate
    return Compute(
        matmul=matmul,
        attention=attention,
        elementwise=_elementwise_bytes(case) * case.grad_accum / bandwidth,
        optimizer=_optimizer_bytes(case) / bandwidth,
        recomputed=tokens
        * (again.projections * flops.layers / layer_rate + again.attention * flops.mixing / attention_rate),
        host=_host_seconds(case),
    )


def _weight_passes(case: Case) -> int:
    """Times that a matmul with weights runs in a step: forward, gradient of the input, and that of trained weights."""
    return 2 if case.config.adapter.is_enabled else 3


def _host_seconds(case: Case) -> float:
    """Copies one after the other: optimizer state to the device and back, weights twice to the device and back."""
    rate = case.config.hardware.links.host_gb_s
    return 0.0 if rate is None else host_bytes(case, moments=2, weights=3) / (rate * 1e9 * LINK_RATE)


def _layer_rate(case: Case, rate: float) -> float:
    """FLOP/s of the layers' projections: those of float8 if they are quantized to it."""
    return case.config.hardware.peak_tflops["float8"] * 1e12 * FLOAT8_RATE if _is_float8(case) else rate


def _is_float8(case: Case) -> bool:
    return "float8" in case.config.hardware.peak_tflops and QuantizationKind.fp8 in case.config.quantization.kinds


@dataclasses.dataclass(frozen=True)
class _Again:
    """Shares of the forward pass that run again in the backward pass."""

    projections: float
    attention: float


def _recomputed(case: Case) -> _Again:
    """Shares that a remat policy recomputes: full all but the last projection of a layer, minimal at most experts."""
    policy, saved = case.remat.policy, set(case.remat.save) | set(case.remat.offload)
    if policy is RematPolicy.none:
        return _Again(0.0, 0.0)
    spec, flops = case.subject.kinds[-1][0], case.subject.forward_flops
    if policy is RematPolicy.minimal:
        saves_experts = case.remat.on(case.sharder).saves_experts
        return _Again(0.0 if saves_experts else 2 / 3 * flops.routed / flops.layers, 0.0)
    mlp_share = spec.feed_forward.forward_flops() / max(spec.forward_flops(case.seq_len), 1.0)
    last = mlp_share / 3
    if policy is RematPolicy.full:
        return _Again(1 - last, 1.0)
    saved_share = last * len(saved & {"mlp_gate", "mlp_up"})
    saved_share += (1 - mlp_share) * len(saved & {"query", "key", "value", "attention_out"}) / 4
    return _Again(max(0.0, 1 - last - saved_share), 0.0 if "context" in saved else 1.0)


def _elementwise_bytes(case: Case) -> float:
    """Bytes that elementwise operations read and write in one pass over the batch."""
    layers = sum(count * case.saved_bytes(kind, NOTHING_RECOMPUTED) for kind, count in case.subject.kinds)
    config = case.config.model
    logits = jnp.dtype(config.dtypes.logits.value).itemsize + jnp.dtype(config.dtypes.compute.value).itemsize
    vocabulary = config.vocab_size / case.sharder.num_shards("act_vocab")
    passes = FLOAT8_PASSES if _is_float8(case) else ELEMENTWISE_PASSES
    return passes * layers + 2 * case.stream_tokens * vocabulary * logits


@per_mesh
def _optimizer_bytes(case: Case) -> float:
    """State is read and written once, gradients are read twice (norm and update); the layers' weights are cast."""
    weights = sum(map(case.local_bytes, case.subject.weights))
    moments = sum(map(case.local_bytes, case.subject.moments))
    is_factored = case.config.optimizer.kind is OptimizerKind.adafactor
    numbers = sum(case.local_bytes(array) / array.dtype.itemsize for array in case.subject.weights)
    return 4.0 * weights + 2.0 * moments + is_factored * FACTORED_PASSES * FLOAT32 * numbers


def _hideable(case: Case, compute: Compute, phase: Phase) -> float:
    """Seconds of compute of a pass behind which transfers can hide."""
    passes = compute.matmul + compute.attention + compute.elementwise
    return HIDEABLE * (passes / 3 if phase is Phase.forward else passes * 2 / 3 + compute.recomputed)


def link_times(case: Case, found: list[Transfer]) -> list[LinkTime]:
    """Bytes and seconds of all transfers by the axes that they cross."""
    times: list[LinkTime] = []
    for axes in dict.fromkeys(item.axes for item in found):
        items = [item for item in found if item.axes == axes]
        parts = [_near_far(case, item) for item in items]
        times.append(
            LinkTime(
                axes=axes,
                bytes=sum(item.bytes for item in items),
                near_bytes=sum(near for near, _ in parts),
                far_bytes=sum(far for _, far in parts),
                seconds=sum(_seconds(case, item) for item in items),
            )
        )
    return times


def _near_far(case: Case, item: Transfer) -> tuple[float, float]:
    """Bytes of a transfer over the links of a node or slice, and over the network between them.

    A ring through several nodes enters each node once, over all its network cards: of S bytes each of the m devices of
    a node that take part sends S / m to the next node. In an all-to-all each device sends its own bytes there.
    """
    devices = math.prod(case.mesh[axis] for axis in item.axes)
    members = near_members(case, item.axes)
    if members >= devices:
        return item.bytes, 0.0
    if item.is_all_to_all:
        far = item.bytes * (devices - members) / max(devices - 1, 1)
        return item.bytes - far, far
    return item.bytes if members > 1 else 0.0, item.bytes / members


@per_mesh
def near_members(case: Case, axes: tuple[str, ...]) -> int:
    """Devices of a group over these axes that share a node (GPU) or a slice (TPU)."""
    links = case.config.hardware.links
    within = dict(zip(AXES, case.sizes.within, strict=True))
    domain = min(links.domain_devices, math.prod(case.sizes.within))
    members, stride = 1, 1
    for axis in reversed(AXES):
        fits = max(1, min(within[axis], domain // stride))
        members *= fits if axis in axes else 1
        stride *= within[axis]
    return members


def _seconds(case: Case, item: Transfer) -> float:
    """Seconds of a transfer if nothing else uses its links."""
    hardware = case.config.hardware
    links = hardware.links
    near, far = _near_far(case, item)
    devices = math.prod(case.mesh[axis] for axis in item.axes)
    seconds = item.calls * START_SECONDS * math.log2(max(devices, 2))
    if links.domain_gb_s:
        seconds += near / (links.domain_gb_s * 1e9 * LINK_RATE * _torus_share(case, item.axes))
    if far and links.network_gb_s:
        seconds += far / (links.network_gb_s * 1e9 * LINK_RATE)
    return seconds


@per_mesh
def _torus_share(case: Case, axes: tuple[str, ...]) -> float:
    """Share of a device's links along which a group over these axes lies: all behind a switch, a part in a torus."""
    dimensions = case.config.hardware.links.torus_dimensions
    if not dimensions:
        return 1.0
    within = dict(zip(AXES, case.sizes.within, strict=True))
    total = math.prod(within.values())
    group = math.prod(within[axis] for axis in axes)
    if total == 1 or group == 1:
        return 1.0
    used = min(dimensions, max(1, round(dimensions * math.log(group) / math.log(total))))
    return used / dimensions
