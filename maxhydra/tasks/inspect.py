"""Report parameters, sharding and memory of a config without allocating anything.

Lists each parameter's axes, sharding and bytes per device. With task.topology it also compiles the training step for
devices that need not be attached, and reports its memory.
"""

import dataclasses
import json
from collections.abc import Iterator

import jax
import numpy as np

from maxhydra import model
from maxhydra.config import Config
from maxhydra.config.schema.hardware import Hardware
from maxhydra.config.schema.tasks.analysis import Format, InspectTask
from maxhydra.measure.compiled import compile_report
from maxhydra.plan.tables import readable_bytes
from maxhydra.runtime.topology import absent_devices
from maxhydra.sharding import Sharder, abstract_mesh, build_mesh, bytes_per_device, is_axes
from maxhydra.tasks import Job, Outcome
from maxhydra.tasks.compile import report_lines
from maxhydra.train import plan_batches, plan_states

NEEDS_DEVICES = KEEPS_RUN = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of the table."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    spec: str
    bytes_per_device: int


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, InspectTask)
    sharder = _sharder(config, task)
    states = plan_states(config, sharder)
    decoder, shardings = states.model, states.shardings()
    parameters = _rows(decoder.shapes, decoder.axes, shardings.weights)
    moments = _rows(states.optimizer_shapes(), states.optimizer_axes(), shardings.opt_state)
    optimizer_bytes = sum(row.bytes_per_device for row in moments)
    parameter_bytes = sum(row.bytes_per_device for row in parameters)
    host_bytes = {
        **({"parameters": parameter_bytes} if config.optimizer.offload_weights else {}),
        **({"optimizer": optimizer_bytes} if config.optimizer.offload else {}),
    }
    count, trained = model.parameter_counts(decoder)
    facts = {
        "parameters": count,
        "trained_parameters": trained,
        "flops_per_token": model.flops_per_token(
            config.model, config.train.seq_len, has_adapter=config.adapter.is_enabled
        ),
        "mesh": {axis: size for axis, size in sharder.mesh.shape.items() if size > 1},
        "devices": sharder.mesh.size,
        "bytes_per_device": {
            "parameters": 0 if config.optimizer.offload_weights else parameter_bytes,
            "optimizer": 0 if config.optimizer.offload else optimizer_bytes,
        },
        **({"host_bytes_per_device": host_bytes} if host_bytes else {}),
    }
    if sharder.stages > 1:
        schedule = sharder.pipeline_schedule(plan_batches(config, sharder).batch // config.train.grad_accum)
        facts["pipeline"] = {
            **dataclasses.asdict(schedule),
            "ticks": schedule.ticks,
            "bubble_fraction": schedule.bubble_fraction,
        }
    report = None if task.topology is None else compile_report(config, sharder)[0]
    if report is not None:
        facts["compiled"] = dataclasses.asdict(report)
    if task.format is Format.json:
        print(json.dumps({**facts, "arrays": [dataclasses.asdict(row) for row in parameters]}, indent=1))
    else:
        dtype = config.model.dtypes.compute.value
        _print(parameters, facts, config.hardware, dtype)
        for line in () if report is None else report_lines(report, config.hardware, dtype):
            print(line)
    return Outcome("finished", "printed")


def _sharder(config: Config, task: InspectTask) -> Sharder:
    """A sharder over the devices of task.topology, or over an abstract mesh."""
    if task.topology is None:
        mesh = abstract_mesh(config.mesh, devices=task.devices, slices=task.slices)
        return Sharder.from_config(config.mesh, mesh)
    devices = absent_devices(task.topology, slices=task.slices, hardware=config.hardware)
    return Sharder.from_config(config.mesh, build_mesh(config.mesh, devices))


def _rows(shapes: object, axes: object, shardings: object) -> list[Row]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    names = jax.tree.leaves(axes, is_leaf=is_axes)
    rows = []
    for (path, leaf), leaf_axes, sharding in zip(leaves, names, jax.tree.leaves(shardings), strict=True):
        spec = sharding.spec
        rows.append(
            Row(
                name=jax.tree_util.keystr(path, simple=True, separator="/"),
                shape=leaf.shape,
                dtype=np.dtype(leaf.dtype).name,
                axes=leaf_axes,
                spec=", ".join(_entry(entry) for entry in spec),
                bytes_per_device=bytes_per_device(leaf.shape, leaf.dtype, spec, sharding.mesh),
            )
        )
    return rows


def _entry(entry: object) -> str:
    return "-" if entry is None else "+".join(entry) if isinstance(entry, tuple) else str(entry)


def _print(rows: list[Row], facts: dict, hardware: Hardware, dtype: str) -> None:
    cells = [("parameter", "shape", "axes", "sharding", "per device")]
    for row in rows:
        shape = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
        axes = ", ".join(axis or "-" for axis in row.axes)
        cells.append((row.name, shape, axes, row.spec, readable_bytes(row.bytes_per_device)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for *left, last in cells:
        print(
            "  ".join([*(cell.ljust(width) for cell, width in zip(left, widths, strict=False)), last.rjust(widths[-1])])
        )
    device_bytes = facts["bytes_per_device"]
    mesh = " x ".join(f"{axis}={n}" for axis, n in facts["mesh"].items()) or "one device"
    capacity = f" of {hardware.memory_gib:g} GiB" if hardware.memory_gib else ""
    trained, count = facts["trained_parameters"], facts["parameters"]
    trained_text = "" if trained == count else f", {trained:,} of them trained ({trained / count:.2%})"
    print(
        f"\n{count:,} parameters{trained_text}, on {facts['devices']:,} devices ({mesh})\n"
        f"per device: weights {readable_bytes(device_bytes['parameters'])}, "
        f"optimizer {readable_bytes(device_bytes['optimizer'])}, "
        f"together {readable_bytes(sum(device_bytes.values()))}{capacity}, before activations\n"
        f"training takes {_gigaflops(facts['flops_per_token'])} GFLOP per token"
    )
    if host := facts.get("host_bytes_per_device"):
        print(f"in host memory per device: optimizer {readable_bytes(host['optimizer'])}")
    if pipeline := facts.get("pipeline"):
        print(
            f"pipeline: {pipeline['stages']} stages x {pipeline['repeats']} repeats, {pipeline['microbatches']} "
            f"microbatches in {pipeline['ticks']} ticks, stages idle {pipeline['bubble_fraction']:.1%} of the time"
        )
    for ceiling in _upper_bounds(facts, hardware, dtype):
        print(ceiling)


def _upper_bounds(facts: dict, hardware: Hardware, dtype: str) -> Iterator[str]:
    """Upper bounds of the throughput from the peak figures of the hardware option, if it has any."""
    if peak := hardware.peak_tflops.get(dtype):
        tokens = facts["devices"] * peak * 1e12 / facts["flops_per_token"]
        yield f"at {peak:g} TFLOP/s a device in {dtype}: at most {tokens:,.0f} tokens a second, reached at 100 % MFU"
    if hardware.bandwidth_gb_s:
        seconds = facts["bytes_per_device"]["parameters"] / (hardware.bandwidth_gb_s * 1e9)
        yield f"at {hardware.bandwidth_gb_s:g} GB/s: reading a device's weights once takes {seconds * 1e3:.3g} ms"


def _gigaflops(flops: float) -> str:
    """Billions of operations, with three digits for a small model."""
    return f"{flops / 1e9:,.1f}" if flops >= 1e9 else f"{flops / 1e9:.3g}"
