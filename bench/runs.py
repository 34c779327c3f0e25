"""Measures the run registry with many runs: building its index, and listing after no change or after one run changed.

    python bench/runs.py --runs 10000

The runs are synthetic: the default config with three settings varied, run.json as a run writes it, and 100 lines of
metrics.
"""

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from maxhydra.config.compose.composer import compose
from maxhydra.config.serialize import to_yaml
from maxhydra.record import environment

ROOT = Path(__file__).parent.parent


def write_runs(folder: Path, count: int, lines: int) -> None:
    """Write sweeps of 100 runs each."""
    rng = random.Random(0)
    config = yaml.safe_load(to_yaml(compose([], None).config))
    text = {name: yaml.safe_dump({name: section}, sort_keys=False) for name, section in config.items()}
    facts = {name: value for name, value in environment().items() if name != "diff"}
    for number in range(count):
        rate, decay, seed = 10 ** rng.uniform(-4, -2), rng.choice([0, 0.1, 0.2]), number % 7
        path = folder / f"sweep{number // 100:03d}" / f"{number:05d}_learning_rate={rate:.3g}"
        path.mkdir(parents=True)
        optimizer = {**config["optimizer"], "learning_rate": rate, "weight_decay": decay}
        varied = {"optimizer": optimizer, "run": {**config["run"], "seed": seed}}
        changed = {name: yaml.safe_dump({name: section}, sort_keys=False) for name, section in varied.items()}
        (path / "config.yaml").write_text("".join({**text, **changed}.values()))
        floor = 2 + (math.log10(rate) + 3) ** 2 + decay
        (path / "metrics.jsonl").write_text("".join(_line(step, floor, rate, rng) for step in range(1, lines + 1)))
        (path / "run.json").write_text(json.dumps(_facts(facts, path.name, number, floor), indent=2))


def _line(step: int, floor: float, rate: float, rng: random.Random) -> str:
    loss = floor + 4 / (1 + step / 12) + rng.gauss(0, 0.03)
    row = {
        "step": step,
        "grad_norm": 1 + 8 / step + rng.random() / 4,
        "learning_rate": rate * min(1, step / 20) * (0.55 + 0.45 * math.cos(step / 100)),
        "loss": loss,
        "tokens": 1024.0,
        "step_time": 0.19 + rng.random() / 100,
        "tokens_per_second": 5300 + rng.gauss(0, 60),
        "tflops_per_device": 0.028 + rng.gauss(0, 3e-4),
    }
    eval_line = json.dumps({"step": step, "eval/loss": loss + 0.1}) + "\n" if step % 20 == 0 else ""
    return json.dumps(row) + "\n" + eval_line


def _facts(common: dict, name: str, number: int, floor: float) -> dict:
    day = f"2026-{1 + number % 12:02d}-{1 + number % 28:02d}"
    session = {"host": common["host"], "pid": 1, "pid_started": "0", "seconds": 60.0, "status": "finished"}
    return {
        **common,
        "name": name,
        "task": "pretrain",
        "status": "finished" if number % 9 else "failed",
        "created": f"{day}T12:00:00Z",
        "updated": f"{day}T12:01:00Z",
        "choices": {"model": "tiny", "optimizer": "adamw"},
        "tags": ["even"] if number % 2 == 0 else [],
        "objective": {"name": "eval/loss", "value": floor},
        "sessions": [{**session, "started": f"{day}T12:00:00Z", "ended": f"{day}T12:01:00Z"}],
    }


def time_command(outputs: Path, *arguments: str) -> dict[str, float]:
    """Wall time and CPU time of a command; other work on the machine affects the latter less."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "maxhydra", "runs", *arguments, "-o", str(outputs)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(wall, 2), "processor": round(processor, 2)}


def measure(folder: Path) -> dict[str, object]:
    index = folder / ".runs.sqlite"
    index.unlink(missing_ok=True)
    figures: dict[str, object] = {
        "index made": time_command(folder, "list"),
        "index MB": round(index.stat().st_size / 1e6, 1),
    }
    repeats = [time_command(folder, "list") for _ in range(3)]
    figures["list"] = min(repeats, key=lambda figure: figure["wall"])
    with next(folder.glob("*/*/metrics.jsonl")).open("a") as file:
        file.write(json.dumps({"step": 10**6, "loss": 1.0}) + "\n")
    figures["list, one run changed"] = time_command(folder, "list")
    conditions = ["status=finished", "optimizer.learning_rate<1e-3", "eval/loss<3", "--sort", "eval/loss"]
    figures["list, filtered and sorted"] = time_command(folder, "list", *conditions)
    figures["best"] = time_command(folder, "best")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=100, help="lines of metrics per run")
    parser.add_argument(
        "--folder", type=Path, help="where to write the runs, or existing runs; default: a temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not any(folder.glob("*")):
            write_runs(folder, options.runs, options.lines)
        load = os.getloadavg()[0]
        print(json.dumps({"runs": options.runs, "lines": options.lines, "load before": load, **measure(folder)}))


if __name__ == "__main__":
    main()
