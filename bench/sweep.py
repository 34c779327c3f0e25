"""A search that ends bad jobs early beside a grid: how near its learning rate comes, with how many steps, and how long
a worker waits for its next job.

    python bench/sweep.py [--trials 20] [--workers 2] [--folder DIR]

Prints one JSON line. Both sweeps run the micro model on the shipped text, through the command that a user types.
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
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="sweep-bench-"))
    settings = ["hydra/sweeper=optuna", f"hydra.sweeper.workers={asked.workers}", f"run.outputs={folder}", *SHORT]
    low, high = RANGE
    rates = [low * (high / low) ** (n / (asked.trials - 1)) for n in range(asked.trials)]
    values = ",".join(f"{rate:.6g}" for rate in rates)
    maxhydra(["-m", *settings, "hydra.sweeper.sampler=grid", f"optimizer.learning_rate={values}", "run.name=grid"])
    search = [f"hydra.sweeper.trials={asked.trials}", "hydra.sweeper.pruner=asha", "hydra.sweeper.min_steps=3"]
    interval = f"optimizer.learning_rate=tag(log,interval({low},{high}))"
    maxhydra(["-m", *settings, *search, interval, "run.name=search"])
    grid, found = summary(folder / "grid"), summary(folder / "search")
    ratio = found["learning_rate"] / grid["learning_rate"]
    line = {"grid": grid, "search": found, "rate_ratio": round(ratio, 3)}
    line["steps_ratio"] = round(found["steps"] / grid["steps"], 3)
    line["longest_wait"] = idle(folder / "search", asked.workers)
    print(json.dumps(line))


def maxhydra(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "maxhydra", *arguments], check=True, stdout=sys.stderr)


def runs(sweep: Path) -> list[dict]:
    return [{**json.loads(path.read_text()), "path": path.parent} for path in sorted(sweep.glob("*/run.json"))]


def summary(sweep: Path) -> dict:
    """The best job of a sweep, and the steps of all."""
    told = runs(sweep)
    best = min((run for run in told if run["status"] == "finished"), key=lambda run: run["objective"]["value"])
    rate = next(word for word in best["command"] if word.startswith("optimizer.learning_rate="))
    return {
        "jobs": len(told),
        "finished": sum(run["status"] == "finished" for run in told),
        "steps": sum(run["end_step"] for run in told),
        "learning_rate": float(rate.partition("=")[2]),
        "loss": round(best["objective"]["value"], 4),
    }


def idle(sweep: Path, workers: int) -> float:
    """Seconds from the end of a job's process to the start of the next one, at the longest, while jobs remained.

    The console of a job is made when it starts, and written last when it ends, a little before its process is gone; the
    k-th job after the first `workers` begins when the k-th has ended.
    """
    consoles = [str(path) for path in sweep.glob("*/console.txt")]
    told = subprocess.run(["stat", "-c", "%.6W %.6Y", *consoles], check=True, capture_output=True, text=True).stdout
    starts, ends = (sorted(map(float, column)) for column in zip(*map(str.split, told.splitlines()), strict=True))
    waits = [start - end for start, end in zip(starts[workers:], ends, strict=False)]
    return round(max(waits, default=0.0), 3)


if __name__ == "__main__":
    main()
