"""Whether a model trained in fewer bits learns the same: one config under several formats, one line of JSON each.

    python bench/same_loss.py formats=none,fp8 seeds=0,1,2 model=llama3.2-1b model.num_layers=12 model.emb_dim=1024 \\
        model.vocab_size=320 data=demo train.steps=500 train.seq_len=512 train.per_device_batch_size=16

The first format is what the others are held against. Each format and seed is a run of its own under --runs (a temporary
folder), with the same data in the same order; `--together` runs them at the same time, for machines where time does not
matter. Losses are means over the seeds: one run differs from the next by as much as a format may cost. `loss_over` is
how much larger the mean training loss of the last fifth is, `worst_over` the most at one logged step of it, `eval_over`
the same of the last evaluation, and `eval_runs` are the last evaluations of single runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from own import split_own

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
    return [{row["step"]: row[name] for row in of_run if name in row} for of_run in rows]


def mean(several: list[Curve]) -> Curve:
    return {step: statistics.fmean(curve[step] for curve in several) for step in several[0]}


def line(name: str, against: str, folders: dict[str, list[Path]], overrides: list[str]) -> dict[str, Any]:
    loss, base = (mean(curves(folders[each], "loss")) for each in (name, against))
    evaluated, of_base = (mean(curves(folders[each], "eval/loss")) for each in (name, against))
    late, last = [step for step in base if step > 0.8 * max(base)], max(evaluated)
    over = sum(loss[step] for step in late) / sum(base[step] for step in late)
    return {
        "bench": "same_loss",
        "format": name,
        "against": against,
        "overrides": overrides,
        "eval_loss": {str(step): round(value, 4) for step, value in evaluated.items()},
        "eval_runs": [round(curve[last], 4) for curve in curves(folders[name], "eval/loss")],
        "eval_over": round(evaluated[last] / of_base[last] - 1, 5),
        "loss_over": round(over - 1, 5),
        "worst_over": round(max(loss[step] / base[step] for step in late) - 1, 5),
    }


def split(overrides: list[str], own: dict[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """What is this script's, with these values where nothing is said, and what is the runs'."""
    given, rest = split_own(overrides, own)
    return {name: given.get(name, value).split(",") for name, value in own.items()}, rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="+")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--together", action="store_true")
    options = parser.parse_intermixed_args()
    own, overrides = split(options.overrides, {"formats": "none,fp8", "seeds": "0"})
    runs = options.runs or Path(tempfile.mkdtemp(prefix="same_loss-"))
    children = []
    for seed in own["seeds"]:
        for name in own["formats"]:
            children.append(start(name, seed, overrides, runs))
            if not options.together:
                children[-1].wait()
    ends = [child.wait() for child in children]
    if any(ends):
        return 1
    folders = {name: [runs / folder(name, seed) for seed in own["seeds"]] for name in own["formats"]}
    for name in own["formats"]:
        print(json.dumps(line(name, own["formats"][0], folders, overrides)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
