"""Compares a pruned search with a grid sweep: its best learning rate, its steps, and how long workers are idle.

    python bench/sweep.py [--trials 20] [--workers 2] [--folder DIR]

Prints one JSON line. Both sweeps train the micro model on the bundled text, through the command line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SHORT = ["model=micro", "train.steps=27", "train.eval_every=3", "train.eval_batches=2", "train.log_every=27"]
SHORT += ["checkpoint.every=1000", "train.sample.tokens=0", "optimizer.schedule.warmup_steps=3", "train.seq_len=32"]
RANGE = (1e-4, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="sweep-bench-"))
    settings = ["hydra/sweeper=optuna", f"hydra.sweeper.workers={options.workers}", f"run.outputs={folder}", *SHORT]
    low, high = RANGE
    rates = [low * (high / low) ** (n / (options.trials - 1)) for n in range(options.trials)]
    values = ",".join(f"{rate:.6g}" for rate in rates)
    maxhydra(["-m", *settings, "hydra.sweeper.sampler=grid", f"optimizer.learning_rate={values}", "run.name=grid"])
    search = [f"hydra.sweeper.trials={options.trials}", "hydra.sweeper.pruner=asha", "hydra.sweeper.min_steps=3"]
    interval = f"optimizer.learning_rate=tag(log,interval({low},{high}))"
    maxhydra(["-m", *settings, *search, interval, "run.name=search"])
    grid, best = summary(folder / "grid"), summary(folder / "search")
    ratio = best["learning_rate"] / grid["learning_rate"]
    line = {"grid": grid, "search": best, "rate_ratio": round(ratio, 3)}
    line["steps_ratio"] = round(best["steps"] / grid["steps"], 3)
    line["longest_wait"] = idle(folder / "search", options.workers)
    print(json.dumps(line))


def maxhydra(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "maxhydra", *arguments], check=True, stdout=sys.stderr)


def runs(sweep: Path) -> list[dict]:
    return [{**json.loads(path.read_text()), "path": path.parent} for path in sorted(sweep.glob("*/run.json"))]


def summary(sweep: Path) -> dict:
    """The best job of a sweep, and the total steps."""
    jobs = runs(sweep)
    best = min((run for run in jobs if run["status"] == "finished"), key=lambda run: run["objective"]["value"])
    rate = next(part for part in best["command"] if part.startswith("optimizer.learning_rate="))
    return {
        "jobs": len(jobs),
        "finished": sum(run["status"] == "finished" for run in jobs),
        "steps": sum(run["end_step"] for run in jobs),
        "learning_rate": float(rate.partition("=")[2]),
        "loss": round(best["objective"]["value"], 4),
    }


def idle(sweep: Path, workers: int) -> float:
    """The longest time in seconds from the end of a job's process to the start of the next, while jobs remained.

    A job's console file is created when it starts and last written when it ends, shortly before its process exits; the
    k-th job after the first `workers` starts when the k-th has ended.
    """
    consoles = [str(path) for path in sweep.glob("*/console.txt")]
    output = subprocess.run(["stat", "-c", "%.6W %.6Y", *consoles], check=True, capture_output=True, text=True).stdout
    starts, ends = (sorted(map(float, column)) for column in zip(*map(str.split, output.splitlines()), strict=True))
    waits = [start - end for start, end in zip(starts[workers:], ends, strict=False)]
    return round(max(waits, default=0.0), 3)


if __name__ == "__main__":
    main()
