"""Compares the losses of one config trained under several quantization formats. One JSON line per format.

    python bench/same_loss.py formats=none,fp8 seeds=0,1,2 model=llama3.2-1b model.num_layers=12 model.emb_dim=1024 \\
        model.vocab_size=320 data=demo train.steps=500 train.seq_len=512 train.per_device_batch_size=16

The first format is the baseline. Each format and seed is a separate run under --runs (default: a temporary folder) with
the same data in the same order; `--together` runs them concurrently, for when speed does not matter. Losses are means
over the seeds, because runs of one format differ by as much as a format may cost. `loss_over` is the relative increase
of the mean training loss over the last fifth of the steps, `worst_over` the largest at a single logged step of it,
`eval_over` that of the last evaluation, and `eval_runs` are the last evaluations of the individual runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import split_arguments

from maxhydra.record.metrics import read_metrics

Curve = dict[int, float]


def start(format_name: str, seed: str, overrides: list[str], runs: Path) -> subprocess.Popen[bytes]:
    run = [f"run.outputs={runs}", f"run.name={folder(format_name, seed)}", f"run.seed={seed}", "checkpoint=none"]
    command = [sys.executable, "-m", "maxhydra", *overrides, f"quantization={format_name}", *run]
    return subprocess.Popen(command, stdout=sys.stderr)


def folder(format_name: str, seed: str) -> str:
    return f"{format_name}-{seed}"


def curves(folders: list[Path], name: str) -> list[Curve]:
    rows = [read_metrics(folder / "metrics.jsonl") for folder in folders]
    return [{row["step"]: row[name] for row in run_rows if name in row} for run_rows in rows]


def mean(runs: list[Curve]) -> Curve:
    return {step: statistics.fmean(curve[step] for curve in runs) for step in runs[0]}


def line(name: str, against: str, folders: dict[str, list[Path]], overrides: list[str]) -> dict[str, Any]:
    loss, base = (mean(curves(folders[format_name], "loss")) for format_name in (name, against))
    eval_loss, base_eval_loss = (mean(curves(folders[format_name], "eval/loss")) for format_name in (name, against))
    late, last = [step for step in base if step > 0.8 * max(base)], max(eval_loss)
    ratio = sum(loss[step] for step in late) / sum(base[step] for step in late)
    return {
        "bench": "same_loss",
        "format": name,
        "against": against,
        "overrides": overrides,
        "eval_loss": {str(step): round(value, 4) for step, value in eval_loss.items()},
        "eval_runs": [round(curve[last], 4) for curve in curves(folders[name], "eval/loss")],
        "eval_over": round(eval_loss[last] / base_eval_loss[last] - 1, 5),
        "loss_over": round(ratio - 1, 5),
        "worst_over": round(max(loss[step] / base[step] for step in late) - 1, 5),
    }


def split(overrides: list[str], defaults: dict[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """This script's arguments as lists, with defaults, and the overrides of the runs."""
    given, rest = split_arguments(overrides, defaults)
    return {name: given.get(name, value).split(",") for name, value in defaults.items()}, rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="+")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--together", action="store_true")
    options = parser.parse_intermixed_args()
    sweep, overrides = split(options.overrides, {"formats": "none,fp8", "seeds": "0"})
    runs = options.runs or Path(tempfile.mkdtemp(prefix="same_loss-"))
    children = []
    for seed in sweep["seeds"]:
        for name in sweep["formats"]:
            children.append(start(name, seed, overrides, runs))
            if not options.together:
                children[-1].wait()
    exit_codes = [child.wait() for child in children]
    if any(exit_codes):
        return 1
    folders = {name: [runs / folder(name, seed) for seed in sweep["seeds"]] for name in sweep["formats"]}
    for name in sweep["formats"]:
        print(json.dumps(line(name, sweep["formats"][0], folders, overrides)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
