"""Runs the command as a user would, in its own process, and reads what it left."""

import hashlib
import importlib.util
import json
import os
import socket
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

from maxhydra.config.schema.metrics import LOGGED
from tests.support import compile_cache as compiling
from tests.support import fork_server as warm

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """A script of bench/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# How processes find each other, which is read when a run starts.
MEETING = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

# A model that compiles and trains in moments; everything else is the default run.
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
    """A clean environment with so many simulated devices."""
    left = ("XLA_", "JAX_", "SLURM_", "PYTHONDONTWRITEBYTECODE")
    keep = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": compiling.flags(devices)}
    return {**keep, **compiling.kept(), **own, **extra}


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "maxhydra", *overrides]


def started(
    *arguments: str, cwd: Path, streams: Sequence[IO[str]], devices: int = 1, module: str = "maxhydra", **extra: str
) -> warm.Command:
    """`python -m MODULE ARGUMENTS...` under way, with these as its input, output and errors."""
    assert not any(name.startswith("JAX_") for name in {*extra} - {*MEETING}), "jax reads these when it is imported"
    numbers, given = [stream.fileno() for stream in streams], environment(devices, **extra)
    address = warm.server(compiling.PREFIX)
    return warm.Command(address, arguments, folder=str(cwd), environment=given, streams=numbers, module=module)


def silent(*overrides: str, cwd: Path, **extra: str) -> warm.Command:
    with open(os.devnull, "r+") as nothing:
        return started(*overrides, cwd=cwd, streams=[nothing] * 3, **extra)


def run(
    *overrides: str, cwd: Path, devices: int = 1, timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        code = started(*overrides, cwd=cwd, devices=devices, streams=(nothing, out, errors), **extra).wait(timeout)
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command(*overrides), code, out.read(), errors.read())


def finished(*overrides: str, cwd: Path, devices: int = 1, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to a good end, or show what went wrong."""
    done = run(*overrides, cwd=cwd, devices=devices, **extra)
    assert done.returncode == 0, f"{overrides}\n{done.stdout}\n{done.stderr}"
    return done


def finished_together(
    count: int, *arguments: str, cwd: Path, devices: int = 1, **extra: str
) -> list[subprocess.CompletedProcess[str]]:
    """So many processes of the command that meet over plain environment variables, each with its own devices."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def one(index: int) -> subprocess.CompletedProcess[str]:
        meeting = dict(zip(MEETING, (address, str(count), str(index)), strict=True)) if count > 1 else {}
        return finished(*arguments, cwd=cwd, devices=devices, **meeting, **extra)

    warm.server(compiling.PREFIX)  # one for all
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def kill_when(arguments: Sequence[str], sign: Path, *, cwd: Path) -> None:
    """Start the command and kill -9 it as soon as a file has grown."""
    before = sign.stat().st_size if sign.exists() else 0
    process = silent(*arguments, cwd=cwd)
    while process.runs() and not (sign.exists() and sign.stat().st_size > before):
        time.sleep(0.002)
    assert process.runs(), "it ended before it could be killed"
    process.kill()
    process.wait()


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step; a step that was logged twice is an error, as is a metric that no objective can name."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    task = facts(folder)["task"]
    unknown = {name for row in rows for name in row if not any(fnmatch(name, known) for known in LOGGED[task])}
    assert unknown <= {"step"}, f"not in maxhydra.config.schema.metrics: {unknown}"
    train = [row for row in rows if "loss" in row]
    by_step = {row["step"]: row["loss"] for row in train}
    assert len(by_step) == len(train), "a step was logged twice"
    return by_step


def parameter_hash(folder: Path, step: int) -> str:
    """Digest of the weights in a checkpoint, bit for bit."""
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(folder / "checkpoints" / str(step) / "params")
    digest = hashlib.sha256()
    for path, leaf in sorted(ocp.tree.to_flat_dict(params).items()):
        digest.update("/".join(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def facts(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())
