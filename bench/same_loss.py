"""Whether a model trained in fewer bits learns the same: one config under several formats, one line of JSON each.

    python bench/same_loss.py formats=none,fp8 model=llama3.2-1b model.num_layers=12 model.emb_dim=1024 \\
        model.vocab_size=320 data=demo train.steps=500 train.seq_len=512 train.per_device_batch_size=16

The first format is what the others are held against. Each is a run of its own under --runs (a temporary folder), with
the same data, seed and order; `--together` runs them at the same time, for machines where time does not matter.
`loss_over` is how much larger the mean training loss of the last fifth is, `worst_over` the most at one logged step of
it, `eval_over` the same of the last evaluation.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from maxhydra.record.metrics import read_metrics


def start(format_name: str, overrides: list[str], runs: Path) -> subprocess.Popen[bytes]:
    own = [f"quantization={format_name}", f"run.outputs={runs}", f"run.name={format_name}", "checkpoint=none"]
    return subprocess.Popen([sys.executable, "-m", "maxhydra", *overrides, *own], stdout=sys.stderr)


def curve(folder: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in read_metrics(folder / "metrics.jsonl") if name in row}


def line(folder: Path, against: Path, overrides: list[str]) -> dict[str, Any]:
    loss, base = curve(folder, "loss"), curve(against, "loss")
    late = [step for step in base if step > 0.8 * max(base)]
    evaluated, of_base = curve(folder, "eval/loss"), curve(against, "eval/loss")
    mean = sum(loss[step] for step in late) / sum(base[step] for step in late)
    return {
        "bench": "same_loss",
        "format": folder.name,
        "against": against.name,
        "overrides": overrides,
        "eval_loss": {str(step): round(value, 4) for step, value in evaluated.items()},
        "eval_over": round(evaluated[max(evaluated)] / of_base[max(of_base)] - 1, 5),
        "loss_over": round(mean - 1, 5),
        "worst_over": round(max(loss[step] / base[step] for step in late) - 1, 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="+")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--together", action="store_true")
    options = parser.parse_intermixed_args()
    named = [text for text in options.overrides if text.startswith("formats=")]
    overrides = [text for text in options.overrides if text not in named]
    formats = (named or ["formats=none,fp8"])[-1].removeprefix("formats=").split(",")
    runs = options.runs or Path(tempfile.mkdtemp(prefix="same_loss-"))
    children = []
    for name in formats:
        children.append(start(name, overrides, runs))
        if not options.together:
            children[-1].wait()
    if any(child.wait() for child in children):
        return 1
    for name in formats:
        print(json.dumps(line(runs / name, runs / formats[0], overrides)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
