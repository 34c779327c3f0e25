"""Search for the mesh, ZeRO-1, remat policy and batch with the highest estimated throughput that fits in memory."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from maxhydra.config.schema.hardware import AXES, DATA
from maxhydra.config.schema.model import RematPolicy
from maxhydra.model.block import Remat
from maxhydra.plan.case import Case, Subject
from maxhydra.plan.estimate import Plan, make_plan
from maxhydra.plan.memory import memory
from maxhydra.sharding import AxisSizes

# Largest tensor-parallel group on a torus, pipeline stages, and sequences in one forward pass of a group of devices.
TORUS_TENSOR = 16
STAGES = (1, 2, 4, 8, 16)
SEQUENCES = (1, 2, 4, 8)
ACCUMULATED = (1, 2, 4, 8, 16, 32, 64)
# Meshes whose other settings are searched; the others are tried with one sequence and full rematerialization only.
FINALISTS = 16
POLICIES = tuple(Remat(policy, (), ()) for policy in (RematPolicy.full, RematPolicy.minimal, RematPolicy.none))


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a search may choose from."""

    devices: int
    slices: int
    batch_tokens: int
    memory_share: float
    results: int


def search(subject: Subject, limits: Limits) -> list[Plan]:
    """The best plans that fit, fastest first; the plans that need the least memory if none fits."""
    first = [
        case
        for sizes in meshes(subject, limits)
        if (case := _with_batch(Case(subject, sizes, POLICIES[0], 0.0, 1, subject.config.train.chunk), 1, limits))
        is not None
    ]
    if not first:
        return []
    ranked = _ranked([case for each in first for case in _state_layouts(each, limits)], limits)[:FINALISTS]
    cases = [
        case
        for plan, sequences, remat in itertools.product(ranked, SEQUENCES, POLICIES)
        if (case := _with_batch(dataclasses.replace(plan.case, remat=remat), sequences, limits)) is not None
    ]
    return _ranked(cases, limits)[: limits.results]


def meshes(subject: Subject, limits: Limits) -> Iterator[AxisSizes]:
    """Axis sizes that multiply to the number of devices and divide every dimension that they split."""
    hardware = subject.config.hardware
    per_slice = limits.devices // limits.slices
    largest_tensor = TORUS_TENSOR if hardware.links.torus_dimensions else hardware.links.domain_devices
    experts = max((moe.experts.experts for moe in subject.experts), default=1)
    # Every device needs a sequence, or a part of one.
    rows = max(1, limits.batch_tokens // subject.config.train.seq_len)
    choices = {
        "tensor": _divisors(per_slice, largest_tensor),
        "sequence": _divisors(per_slice, max(1, 2 * limits.devices // rows)),
        "expert": _divisors(per_slice, experts),
        "stage": [size for size in STAGES if subject.spec.repetitions % size == 0],
        "fsdp": _divisors(per_slice, per_slice),
    }
    across = tuple(limits.slices if axis == "data" else 1 for axis in AXES)
    for chosen in itertools.product(*choices.values()):
        if per_slice % math.prod(chosen):
            continue
        sizes = dict(zip(choices, chosen, strict=True)) | {"data": per_slice // math.prod(chosen)}
        found = AxisSizes(tuple(sizes.get(axis, 1) for axis in AXES), across)
        if _divides(Case(subject, found, POLICIES[0], 1.0, 1, subject.config.train.chunk)):
            yield found


def _state_layouts(case: Case, limits: Limits) -> list[Case]:
    """The case, and with ZeRO-1 if it has data parallelism and does not fit: ZeRO-1 saves memory and no time."""
    if case.mesh[DATA] == 1 or _fits(case, limits):
        return [case]
    return [case, dataclasses.replace(case, shards_over_data=True)]


def _fits(case: Case, limits: Limits) -> bool:
    capacity = case.config.hardware.memory_gib or math.inf
    return memory(case).peak <= capacity * 2**30 * limits.memory_share


def _divisors(number: int, largest: int) -> list[int]:
    """Divisors up to a size: powers of two, and the number itself."""
    powers = [2**power for power in range(number.bit_length()) if number % 2**power == 0]
    return [size for size in dict.fromkeys([*powers, number]) if size <= largest]


def _divides(case: Case) -> bool:
    """Whether the mesh divides every weight and the sequence."""
    if case.seq_len % case.sharder.num_shards("act_length"):
        return False
    for array in case.subject.weights:
        for size, entry in zip(array.shape, case.sharder.spec(array.axes), strict=True):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            if size % math.prod(case.mesh[axis] for axis in axes):
                return False
    return True


def _with_batch(case: Case, sequences: int, limits: Limits) -> Case | None:
    """The case with this many sequences per batch shard, accumulated up to the largest batch, if any."""
    rows = sequences * case.sharder.num_shards("act_batch") / case.devices
    tokens = rows * case.devices * case.seq_len
    fitting = [times for times in ACCUMULATED if tokens * times <= limits.batch_tokens]
    return dataclasses.replace(case, rows=rows, grad_accum=fitting[-1]) if fitting else None


def _ranked(cases: Sequence[Case], limits: Limits) -> list[Plan]:
    """Plans of the cases that fit, fastest first; without any, those that need the least memory."""
    fitting = [case for case in cases if _fits(case, limits)]
    if not fitting:
        fitting = sorted(cases, key=lambda case: memory(case).peak)[: limits.results]
        return [make_plan(case, memory_share=limits.memory_share) for case in fitting]
    plans = [make_plan(case, memory_share=limits.memory_share) for case in fitting]
    return sorted(plans, key=lambda plan: -(plan.time.tokens_per_second if plan.time else -plan.memory.peak))
