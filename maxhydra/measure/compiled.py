"""Report of a compiled training step: memory, kernels, collectives and their theoretical minimum.

The devices need not be attached (runtime/topology.py). Nothing is measured: these are the compiler's own numbers.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax

from maxhydra.config import Config
from maxhydra.kernels.dispatch import Choice, recording_choices
from maxhydra.measure import hlo
from maxhydra.measure.minimum import minimum_wire_bytes
from maxhydra.model import flops_per_token
from maxhydra.runtime.topology import compiler_options
from maxhydra.sharding import Sharder
from maxhydra.train.batches import plan_batches
from maxhydra.train.compile import explain_oom, trace_pretraining_step, without_compilation_cache


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Memory, kernels, collectives and cost of a compiled step. Bytes are per device."""

    device: str
    devices: int
    mesh: dict[str, int]
    """Axes of more than one device."""
    trace_seconds: float
    seconds: float
    """Compile time."""
    bytes_per_device: dict[str, int]
    """Bytes of the state and the batch, of the temporaries and outputs of the step, and of the program."""
    operations: list[str]
    """The backend that serves each operation, and the first reason against each faster one."""
    kernels: dict[str, int]
    """Runs of custom kernels in a step, by name."""
    collectives: list[dict[str, Any]]
    """Bytes and number of each kind of collective by mesh axes and dtype, the most bytes first."""
    wire: dict[str, dict[str, float]]
    """MiB that a device sends along each combination of mesh axes, the theoretical minimum, and the ratio; in total
    also the minimum and the ratio if nothing were recomputed."""
    unknown_loops: int
    """While loops without a known trip count, counted once."""
    largest_collectives: list[dict[str, Any]]
    largest_arrays: list[dict[str, Any]]
    tflop_per_device: float
    """Model TFLOP of a step."""


def compile_report(
    config: Config, sharder: Sharder, *, segments: bool = True
) -> tuple[CompileReport, jax.stages.Compiled]:
    """Compile the pretraining step for the devices of the sharder's mesh, which need not be attached.

    segments: rows are packed from several documents.
    """
    assert isinstance(sharder.mesh, jax.sharding.Mesh)
    start = time.perf_counter()
    with recording_choices() as choices:
        traced = trace_pretraining_step(config, sharder, segments=segments)
    traced_at = time.perf_counter()
    try:
        options = compiler_options(config.hardware, sharder.mesh.devices.flatten().tolist())
        with without_compilation_cache():
            compiled = _lower(traced, sharder.mesh).compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        raise explain_oom(error, config) from None
    seconds = time.perf_counter() - traced_at
    spec = plan_batches(config, sharder)
    tokens = spec.batch * spec.rows.seq_len
    report = CompileReport(
        device=sharder.mesh.devices.flat[0].device_kind,
        devices=sharder.mesh.size,
        mesh={axis: size for axis, size in sharder.mesh.shape.items() if size > 1},
        trace_seconds=traced_at - start,
        seconds=seconds,
        bytes_per_device=_memory(compiled),
        operations=_operation_lines(choices),
        tflop_per_device=flops_per_token(config.model, spec.rows.seq_len) * tokens / sharder.mesh.size / 1e12,
        **_program_facts(compiled.as_text() or "", config, sharder),
    )
    return report, compiled


def _lower(traced: jax.stages.Traced, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    # Triton kernels outside a shard_map are lowered for the default device, which must therefore be one of the mesh.
    with jax.default_device(mesh.devices.flat[0]):
        return traced.lower()


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes in device memory; those of arrays in pinned host memory are not among them."""
    memory: Any = compiled.memory_analysis()
    return {
        "state and batch": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }


def _operation_lines(choices: Iterable[Choice]) -> list[str]:
    lines = []
    for choice in choices:
        reasons = "; ".join(choice.skipped)
        lines.append(f"{choice.operation}: {choice.backend}" + (f" ({reasons})" if reasons else ""))
    return lines


def _program_facts(text: str, config: Config, sharder: Sharder) -> dict[str, Any]:
    program = hlo.parse_program(text)
    mesh, moved = dict(sharder.mesh.shape), hlo.collectives(program)
    ranked = sorted(moved, key=lambda one: -one.wire_bytes * one.count)
    return {
        "kernels": hlo.kernel_calls(program),
        "collectives": summarize(moved, mesh),
        "wire": _wire(moved, config, sharder),
        "unknown_loops": program.unknown_loops,
        "largest_collectives": [_row(one, mesh) for one in ranked[:12]],
        "largest_arrays": [
            {"shape": shape, "mib": _mib(size), "source": source[-100:]}
            for shape, size, source in hlo.largest_arrays(program)
        ],
    }


def _wire(moved: list[hlo.Collective], config: Config, sharder: Sharder) -> dict[str, dict[str, float]]:
    mesh = dict(sharder.mesh.shape)
    rows = compare_with_minimum(moved, minimum_wire_bytes(config, sharder), mesh)
    saved = compare_with_minimum(moved, minimum_wire_bytes(config, sharder, recomputed=False), mesh)["total"]
    if_saved = {f"{key}_if_saved": value for key, value in saved.items() if key != "mib"}
    return rows | {"total": rows["total"] | if_saved}


def summarize(moved: Iterable[hlo.Collective], mesh: dict[str, int]) -> list[dict[str, Any]]:
    """Number and bytes of the collectives of a step by kind, mesh axes and dtype, the most bytes first."""
    groups: dict[tuple[str, str, str], list[hlo.Collective]] = defaultdict(list)
    for one in moved:
        groups[one.kind, hlo.axes_of(one.devices, mesh), one.dtype].append(one)
    rows = [
        {
            "kind": kind,
            "axes": axes,
            "dtype": dtype,
            "count": sum(one.count for one in members),
            "mib": _mib(sum(one.bytes * one.count for one in members)),
            "wire_mib": _mib(sum(one.wire_bytes * one.count for one in members)),
        }
        for (kind, axes, dtype), members in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["mib"])


def compare_with_minimum(
    moved: Iterable[hlo.Collective], minimum: dict[str, float], mesh: dict[str, int]
) -> dict[str, dict[str, float]]:
    """MiB on the wire and the minimum by mesh axes; a ratio only if the minimum is not zero."""
    counted: dict[str, float] = defaultdict(float)
    for one in moved:
        counted[hlo.axes_of(one.devices, mesh)] += one.wire_bytes * one.count
    rows = {}
    for axes in sorted({*counted, *minimum}):
        row = {"mib": _mib(counted[axes]), "minimum_mib": _mib(minimum.get(axes, 0))}
        rows[axes] = row | ({"ratio": round(counted[axes] / minimum[axes], 3)} if minimum.get(axes) else {})
    total, least = sum(counted.values()), sum(minimum.values())
    rows["total"] = {"mib": _mib(total), "minimum_mib": _mib(least)}
    return rows | ({"total": rows["total"] | {"ratio": round(total / least, 3)}} if least else {})


def _row(one: hlo.Collective, mesh: dict[str, int]) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "axes": hlo.axes_of(one.devices, mesh),
        "operand": one.operand,
        "mib": _mib(one.bytes),
        "count": one.count,
        "source": one.source[-100:],
    }


def _mib(count: float) -> float:
    return round(count / 2**20, 3)
