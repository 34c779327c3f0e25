"""Asynchronous against synchronous rollouts: seconds per step and final rewards over several seeds, as one JSON line.

python bench/async_rl.py [devices=1] [rollout_devices=1] [max_staleness=2] [batch=256] [seeds=3] [skip=10] [OVERRIDES]

Without `checkpoint.load_parameters` among the overrides, experiment=arithmetic_pretrain and arithmetic_sft run first,
once per folder. `devices=1` trains and samples on one device; with more, `rollout_devices` of them sample in the
asynchronous runs. Both kinds of runs have the same batches. On a CPU, devices are simulated. `skip`: first steps, which
compile.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from arguments import split_arguments

DEFAULTS = {"devices": 1, "rollout_devices": 1, "max_staleness": 2, "batch": 256, "seeds": 3, "skip": 10}
BASE = ("arithmetic_pretrain", "arithmetic_sft")


def train(*overrides: str, devices: int) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "maxhydra", *overrides]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def measure(name: str, skip: int) -> dict[str, float]:
    """Mean seconds of a step, the last held-out reward, and the mean training reward over the last tenth."""
    rows = [json.loads(line) for line in (Path("outputs") / name / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    last = steps[-max(1, len(steps) // 10) :]
    measured = {
        "step_seconds": mean(row["step_time"] for row in steps[skip:]),
        "reward": mean(row["reward/mean"] for row in last),
    }
    if evaluated := [row["eval/reward"] for row in rows if "eval/reward" in row]:
        measured["eval_reward"] = evaluated[-1]
    for metric in ("rollout/staleness", "rollout/tokens_per_second", "rollout/wait_seconds"):
        if metric in last[-1]:
            measured[metric] = mean(row[metric] for row in steps[skip:])
    return {metric: round(value, 5) for metric, value in measured.items()}


def main() -> None:
    own, overrides = split_arguments(sys.argv[1:], DEFAULTS)
    options = {**DEFAULTS, **{name: int(value) for name, value in own.items()}}
    if not any(override.startswith("checkpoint.load_parameters=") for override in overrides):
        for experiment in BASE:
            if not (Path("outputs") / experiment / "report.html").exists():
                train(f"experiment={experiment}", devices=1)
    if not any(override.startswith("experiment=") for override in overrides):
        overrides = ["experiment=arithmetic_grpo", *overrides]
    devices, sampling = options["devices"], options["rollout_devices"] if options["devices"] > 1 else 0
    asynchronous = [f"task.max_staleness={options['max_staleness']}", f"task.rollout_devices={sampling}"]
    # Neither kind waits for exact-size programs.
    modes = {"synchronous": ([], devices), "asynchronous": (asynchronous, devices - sampling)}
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for seed in range(options["seeds"]):
        for mode, (settings, training) in modes.items():
            name, batch = f"async_rl_{mode}_{seed}", options["batch"] / training
            common = [f"run.name={name}", f"run.seed={seed}", "train.log_every=1", "task.engine.deterministic=false"]
            size = f"train.per_device_batch_size={batch:g}"
            train(*overrides, *common, size, *settings, devices=devices)
            results[mode].append(measure(name, options["skip"]))
    print(json.dumps({**options, "overrides": overrides, "results": results, **summary(results)}))


def summary(results: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Ratio of seconds per step, synchronous over asynchronous, and mean and standard deviation of the rewards."""
    seconds = {mode: mean(run["step_seconds"] for run in runs) for mode, runs in results.items()}
    key = "eval_reward" if "eval_reward" in results["synchronous"][0] else "reward"
    rewards = {mode: [run[key] for run in runs] for mode, runs in results.items()}
    return {
        "speedup": round(seconds["synchronous"] / seconds["asynchronous"], 3),
        key: {
            mode: [round(mean(values), 4), round(stdev(values), 4) if len(values) > 1 else None]
            for mode, values in rewards.items()
        },
    }


if __name__ == "__main__":
    main()
