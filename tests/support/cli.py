"""Run the command line as a user would, in a separate process, and read the results."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import IO

import numpy as np
import orbax.checkpoint as ocp

from maxhydra.config.errors import last_of_each_key
from maxhydra.config.schema.metrics import LOGGED
from tests.support import compile_cache, fork_server
from tests.support.ports import free_address

ROOT = Path(__file__).parents[2]


def bench_script(name: str, *, folder: str = "bench") -> ModuleType:
    """Import a script of bench/ or scripts/, which are not packages."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Variables through which processes form a cluster; read when a run starts.
CLUSTER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

# A model that compiles and trains in seconds; everything else is the default config.
SMALL = [
    "model.num_layers=2",
    "model.emb_dim=32",
    "model.mlp_dim=64",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "train.seq_len=32",
    "train.per_device_batch_size=8",
    "train.log_every=1",
    "train.eval_every=0",
    "train.eval_batches=2",
    "train.sample.tokens=0",
    "optimizer.schedule.warmup_steps=0",
]


def environment(devices: int = 1, **extra: str) -> dict[str, str]:
    """A clean environment with `devices` simulated devices."""
    removed = ("XLA_", "JAX_", "SLURM_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    flags = f"{compile_cache.xla_flags(devices)} {compile_cache.SINGLE_THREAD}"
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return {**inherited, **compile_cache.cache_variables(), **settings, **extra}


def forked_jobs() -> dict[str, str]:
    """Variables with which a command starts its jobs in the fork server."""
    return {fork_server.PYTHON_VARIABLE: str(fork_server.write_python(compile_cache.PREFIX))}


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "maxhydra", *overrides]


def start(
    *arguments: str, cwd: Path, streams: Sequence[IO[str]], devices: int = 1, module: str = "maxhydra", **extra: str
) -> fork_server.Command:
    """Start `python -m MODULE ARGUMENTS...` with the given stdin, stdout and stderr; its jobs are forked as well.

    A later override replaces an earlier one of the same key, so that tests can change a value of SMALL.
    """
    arguments = tuple(last_of_each_key(arguments))
    late = {name for name in {*extra} - {*CLUSTER_VARIABLES} if name.startswith("JAX_")}
    assert not late, f"jax reads {late} on import, which the fork server has already done"
    files, variables = [stream.fileno() for stream in streams], environment(devices, **forked_jobs(), **extra)
    address = fork_server.server_address(compile_cache.PREFIX)
    return fork_server.Command(address, arguments, folder=str(cwd), environment=variables, streams=files, module=module)


def start_silent(*overrides: str, cwd: Path, **extra: str) -> fork_server.Command:
    """Start a command with all streams connected to /dev/null."""
    with open(os.devnull, "r+") as devnull:
        return start(*overrides, cwd=cwd, streams=[devnull] * 3, **extra)


def run(
    *overrides: str, cwd: Path, devices: int = 1, timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as devnull:
        code = start(*overrides, cwd=cwd, devices=devices, streams=(devnull, out, errors), **extra).wait(timeout)
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command(*overrides), code, out.read(), errors.read())


def run_ok(
    *overrides: str, cwd: Path, devices: int = 1, timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed; its output is shown if it fails."""
    done = run(*overrides, cwd=cwd, devices=devices, timeout=timeout, **extra)
    assert done.returncode == 0, f"{overrides}\n{done.stdout}\n{done.stderr}"
    return done


def start_processes(
    count: int, *arguments: str, cwd: Path, module: str = "maxhydra", folder: str = ""
) -> list[fork_server.Command]:
    """Start a command in `count` processes that form a cluster; what process N prints is in the file console.N.

    With `folder`, such as "host-{}", process N runs in its own folder below `cwd`.
    """
    address = free_address()
    processes = []
    for index in range(count):
        cluster = dict(zip(CLUSTER_VARIABLES, (address, str(count), str(index)), strict=True))
        with open(cwd / f"console.{index}", "w") as console, open(os.devnull) as null:
            streams = (null, console, console)
            own = cwd / folder.format(index)
            own.mkdir(exist_ok=True)
            processes.append(start(*arguments, cwd=own, streams=streams, module=module, **cluster))
    return processes


def run_processes(
    count: int, *arguments: str, cwd: Path, devices: int = 1, timeout: float = 240, **extra: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command in `count` processes that form a cluster through JAX variables, each with its own devices."""
    address = free_address()

    def run_process(index: int) -> subprocess.CompletedProcess[str]:
        values = (address, str(count), str(index))
        cluster = dict(zip(CLUSTER_VARIABLES, values, strict=True)) if count > 1 else {}
        return run_ok(*arguments, cwd=cwd, devices=devices, timeout=timeout, **cluster, **extra)

    fork_server.server_address(compile_cache.PREFIX)  # Started once, before the threads.
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run_process, range(count)))


def kill_when(arguments: Sequence[str], file: Path, *, cwd: Path) -> None:
    """Start a command and kill -9 it as soon as a file has grown."""
    size_before = file.stat().st_size if file.exists() else 0
    process = start_silent(*arguments, cwd=cwd)
    while process.is_running() and not (file.exists() and file.stat().st_size > size_before):
        time.sleep(0.002)
    assert process.is_running(), "the process ended before it could be killed"
    process.kill()
    process.wait()


def rewind(folder: Path, step: int, name: str) -> Path:
    """Copy a finished run, as if it had been killed after its last step with the checkpoint of `step` as the newest."""
    killed = shutil.copytree(folder, folder.with_name(name))
    for path in (killed / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > step:
            shutil.rmtree(path)
    (killed / "run.json").write_text(json.dumps({**facts(killed), "status": "preempted"}))
    return killed


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step. Fails if a step was logged twice, or a metric is missing from the schema's table."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    task = facts(folder)["task"]
    unknown = {name for row in rows for name in row if not any(fnmatch(name, known) for known in LOGGED[task])}
    assert unknown <= {"step"}, f"not in maxhydra.config.schema.run: {unknown}"
    train = [row for row in rows if "loss" in row]
    by_step = {row["step"]: row["loss"] for row in train}
    assert len(by_step) == len(train), "a step was logged twice"
    return by_step


def parameter_hash(folder: Path, step: int) -> str:
    """SHA-256 of the weights in a checkpoint."""
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(folder / "checkpoints" / str(step) / "params")
    digest = hashlib.sha256()
    for path, leaf in sorted(ocp.tree.to_flat_dict(params).items()):
        digest.update("/".join(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def facts(folder: Path) -> dict:
    """Contents of run.json."""
    return json.loads((folder / "run.json").read_text())
