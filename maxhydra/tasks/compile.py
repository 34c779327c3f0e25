"""Compile the pretraining step for devices that need not be attached, report it, and write the executable.

A run with the same config and `hardware.compiled=<task.output>` loads the executable instead of compiling.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.config.schema.tasks.analysis import CompileTask, Format
from maxhydra.measure.compiled import CompileReport, compile_report
from maxhydra.plan.estimate import with_remat
from maxhydra.plan.tables import readable_bytes
from maxhydra.runtime.topology import absent_devices
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, Outcome
from maxhydra.train.executable import Manifest, write_executable

NEEDS_DEVICES = KEEPS_RUN = False
COMPILES = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, CompileTask)
    if config.hardware.platform is Platform.auto:
        # The compiler flags are those of the hardware option, and detection would find this host, not the topology.
        reason, accepted = (
            "is auto; the compiler flags depend on it",
            "the option of the devices: gpu-h200, tpu-v5p, cpu",
        )
        raise ConfigError(Problem("hardware", reason, accepted=accepted, hint="use the same option for the run"))
    folder = None if task.output is None else Path(task.output).expanduser()
    if folder is not None and folder.exists():
        raise ConfigError(Problem("task.output", "exists already", value=task.output, accepted="a new folder"))
    devices = (
        jax.devices()
        if task.topology is None
        else absent_devices(task.topology, slices=task.slices, hardware=config.hardware)
    )
    sharder = Sharder.from_config(config.mesh, build_mesh(config.mesh, devices))
    limit = config.hardware.memory_gib
    # The executable is that of the config as given: a run that uses it does not choose again.
    chosen = with_remat(config, devices=len(devices), slices=task.slices, memory_gib=limit)
    report, compiled = compile_report(chosen, sharder, segments=task.segments)
    facts = {"topology": task.topology, **dataclasses.asdict(report)}
    if folder is not None:
        size = write_executable(folder, compiled, Manifest.of(config, sharder))
        (folder / "report.json").write_text(json.dumps(facts, indent=1))
        facts["executable"] = {"path": str(folder), "bytes": size}
    if task.format is Format.json:
        print(json.dumps(facts, indent=1))
    else:
        for line in report_lines(report, config.hardware, config.model.dtypes.compute.value):
            print(line)
        if folder is not None:
            print(f"wrote {folder}; start the run with hardware.compiled={folder}")
    return Outcome("finished", "printed")


def report_lines(report: CompileReport, hardware: Hardware, dtype: str) -> Iterator[str]:
    """The report as lines of text."""
    device_bytes = report.bytes_per_device
    capacity = f" of {hardware.memory_gib:g} GiB" if hardware.memory_gib else ""
    parts = ", ".join(f"{name} {readable_bytes(size)}" for name, size in device_bytes.items())
    yield f"\ncompiled for {report.devices} x {report.device} in {report.seconds:.0f} s"
    yield f"per device: {readable_bytes(sum(device_bytes.values()))}{capacity} ({parts})"
    yield from (f"  {line}" for line in report.operations)
    kernels = ", ".join(f"{count} x {name}" for name, count in sorted(report.kernels.items()))
    yield f"kernels: {kernels or 'only those that XLA generates'}"
    peak = hardware.peak_tflops.get(dtype)
    least = f", at least {report.tflop_per_device / peak:.3g} s at {peak:g} TFLOP/s" if peak else ""
    yield f"a step takes {report.tflop_per_device:,.1f} TFLOP per device{least}"
    for row in report.collectives:
        along = f" along {row['axes']}" if row["axes"] else ""
        yield f"{row['count']} x {row['kind']}{along} in {row['dtype']}: {readable_bytes(int(row['mib'] * 2**20))}"
    for axes, row in report.wire.items():
        least = f", at least {row['minimum_mib']:,.1f} MiB ({row['ratio']:.2f} x)" if "ratio" in row else ""
        yield f"a device sends along {axes or 'no axis'}: {row['mib']:,.1f} MiB{least}"
