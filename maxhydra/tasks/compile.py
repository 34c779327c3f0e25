"""Compile the pretraining step for devices that need not be attached, report it, and write the executable.

A run with the same config and `hardware.compiled=<task.output>` loads the executable instead of compiling.
"""

import dataclasses
import json
from pathlib import Path

import jax

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.analysis import CompileTask, Format
from maxhydra.measure.compiled import compile_report, report_lines
from maxhydra.runtime.topology import absent_devices
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, Outcome
from maxhydra.train.executable import Manifest, write_executable

NEEDS_DEVICES = KEEPS_RUN = False
COMPILES = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, CompileTask)
    folder = None if task.output is None else Path(task.output).expanduser()
    if folder is not None and folder.exists():
        raise ConfigError(Problem("task.output", "exists already", value=task.output, accepted="a new folder"))
    devices = (
        jax.devices()
        if task.topology is None
        else absent_devices(task.topology, slices=task.slices, hardware=config.hardware)
    )
    sharder = Sharder(build_mesh(config.mesh, devices), config.mesh.rules)
    report, compiled = compile_report(config, sharder, segments=task.segments)
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
