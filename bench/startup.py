"""Measures cold start times: --help, --cfg job, and the first training step. Prints one JSON line.

python bench/startup.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(arguments: list[str], cwd: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "maxhydra", *arguments], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def until_first_step(cwd: str) -> float:
    """From the command to the first line of metrics.jsonl, without a compilation cache."""
    arguments = ["run.name=first", "hardware.compilation_cache=null", "train.log_every=1", "train.steps=300"]
    metrics = Path(cwd) / "outputs" / "first" / "metrics.jsonl"
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "maxhydra", *arguments], cwd=cwd, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    elapsed = time.perf_counter() - start
    process.kill()
    process.wait()
    return elapsed


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as cwd:
        best = {
            "help": min(seconds(["--help"], cwd) for _ in range(5)),
            "cfg_job": min(seconds(["--cfg", "job"], cwd) for _ in range(5)),
            "first_step": until_first_step(cwd),
        }
    print(json.dumps({"bench": "startup", "unit": "s", **{name: round(value, 3) for name, value in best.items()}}))


if __name__ == "__main__":
    main()
