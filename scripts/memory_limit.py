"""Serve and train by GRPO a model that exceeds the memory limit of a process, in two processes.

    python scripts/memory_limit.py [--serve-mib 1900] [--grpo-mib 2600] [FOLDER]

Needs root: each process gets a control group with the limit (version 1 or 2). One process must fail, two with
mesh.fsdp=2 must give the completion and the gradient norms of one process without a limit. Prints a table in Markdown
with the peak memory of each process. Exit code 1 if a result differs.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = Path("/sys/fs/cgroup")
TIMEOUT_SECONDS = 900
# 529 and 118 million weights in float32.
MODELS = {
    "serve": ["model=micro", "model.emb_dim=2048", "model.mlp_dim=2048", "model.num_heads=32", "model.num_layers=18"],
    "grpo": ["model=micro", "model.emb_dim=1024", "model.mlp_dim=1024", "model.num_heads=16", "model.num_layers=16"],
}
for overrides in MODELS.values():
    overrides += ["model.head_dim=64", f"model.num_kv_heads={overrides[3].partition('=')[2]}"]
ENGINE = ["task.engine.max_batch=8", "task.engine.cache_tokens=256", "task.engine.page_size=32", "mesh.fsdp=2"]
SERVE = ["task=serve", *MODELS["serve"], "checkpoint.load_parameters=outputs/serve", *ENGINE, "task.port=0"]
GRPO = [
    *("task=grpo", *MODELS["grpo"], "checkpoint.load_parameters=outputs/grpo", *ENGINE),
    *("data=arithmetic", "data.record_type=prompts"),
    *("reward=format", "reward.terms.format.pattern='.*[a-zA-Z].*'", "train.seq_len=20", "train.steps=3"),
    *("train.per_device_batch_size=4", "train.eval_batches=0", "train.log_every=1", "train.sample.tokens=0"),
    *("task.max_tokens=4", "task.group_size=4"),
]
BODY = {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Group:
    """A control group with a memory limit; without one if `limit` is 0."""

    def __init__(self, name: str, limit: int):
        is_v2 = (GROUPS / "cgroup.controllers").exists()
        self.path = (GROUPS if is_v2 else GROUPS / "memory") / name
        self.path.mkdir(exist_ok=True)
        self._peak = "memory.peak" if is_v2 else "memory.max_usage_in_bytes"
        if limit:
            (self.path / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit))

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak_mib(self) -> int:
        return int((self.path / self._peak).read_text()) // 2**20

    def remove(self) -> None:
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


def start(count: int, arguments: list[str], folder: Path, limit: int) -> list[tuple[subprocess.Popen, Group]]:
    """Start a command in `count` processes with a limit each; what process N prints is in the file console.N."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for index in range(count):
        group = Group(f"maxhydra-{os.getpid()}-{index}-{time.monotonic_ns()}", limit)
        flags = f"--xla_force_host_platform_device_count={2 // count}"
        variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        if count > 1:
            cluster = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
            variables |= dict(zip(cluster, (address, str(count), str(index)), strict=True))
        with open(folder / f"console.{index}", "w") as console:
            process = subprocess.Popen(
                [sys.executable, "-m", "maxhydra", *arguments],
                cwd=folder,
                env=os.environ | variables,
                stdout=console,
                stderr=console,
                preexec_fn=group.enter,
            )
        started.append((process, group))
    return started


def finish(started: list[tuple[subprocess.Popen, Group]]) -> tuple[list[int], list[int]]:
    """Exit codes and peak memory of all processes."""
    codes = [process.wait(TIMEOUT_SECONDS) for process, _ in started]
    peaks = [group.peak_mib() for _, group in started]
    for _, group in started:
        group.remove()
    return codes, peaks


def serve(count: int, folder: Path, limit: int) -> tuple[str | None, list[int], list[int]]:
    """Text of a completion, None if the server does not start or is killed; exit codes and peaks."""
    started, console = start(count, SERVE, folder, limit), folder / "console.0"
    while not (address := re.search(r"http://\S+", console.read_text())) and started[0][0].poll() is None:
        time.sleep(0.2)
    text = None
    if address:
        request = urllib.request.Request(f"{address[0]}/completions", json.dumps(BODY).encode())
        request.add_header("Content-Type", "application/json")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
            text = json.load(reply)["choices"][0]["text"]
        for process, _ in reversed(started):
            process.send_signal(signal.SIGTERM)
    return text, *finish(started)


def grpo(count: int, folder: Path, limit: int, name: str) -> tuple[list[float] | None, list[int], list[int]]:
    """Gradient norms of the steps, None if the run fails; exit codes and peaks."""
    codes, peaks = finish(start(count, [*GRPO, f"run.name={name}"], folder, limit))
    if any(codes):
        return None, codes, peaks
    rows = map(json.loads, (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines())
    return [row["grad_norm"] for row in rows if "grad_norm" in row], codes, peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve-mib", type=int, default=1900, help="limit of a process that serves")
    parser.add_argument("--grpo-mib", type=int, default=2600, help="limit of a process that trains")
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="memory-limit-"))
    for task, model in MODELS.items():
        save = ["train.steps=1", "train.seq_len=32", "train.per_device_batch_size=1", "train.eval_batches=0"]
        save += ["optimizer=sgd", "mesh.fsdp=2", f"run.name={task}", "train.sample.tokens=0"]
        codes, _ = finish(start(1, [*model, *save], folder, 0))
        assert codes == [0], (folder / "console.0").read_text()[-2000:]
    print("| task | limit, MiB | processes | exit codes | peak, MiB | result |\n|---|---|---|---|---|---|")
    is_equal = True
    for task, limit in (("serve", options.serve_mib), ("grpo", options.grpo_mib)):
        expected = None
        for count, bound in ((1, 0), (1, limit), (2, limit)):
            size = bound * 2**20
            run = serve(count, folder, size) if task == "serve" else grpo(count, folder, size, f"grpo{count}_{bound}")
            result, codes, peaks = run
            print(f"| {task} | {bound or 'none'} | {count} | {codes} | {peaks} | {result!r} |", flush=True)
            if count == 1 and not bound:
                expected = result
                is_equal &= result is not None
            else:
                is_equal &= (result is None) if count == 1 else _agree(result, expected)
    sys.exit(not is_equal)


def _agree(found: str | list[float] | None, expected: str | list[float] | None) -> bool:
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(abs(a - b) < 1e-5 for a, b in zip(found, expected, strict=True))
    return found is not None and found == expected


if __name__ == "__main__":
    main()
