"""Run folders in their stored format, written without the code under test."""

import json
import math
import socket
from pathlib import Path

CONFIG = """\
task:
  name: pretrain
model:
  num_layers: 2
  pattern:
  - layer
optimizer:
  kind: adamw
  learning_rate: {rate}
  schedule:
    kind: cosine
run:
  name: x
  seed: {seed}
  notes: {notes}
train:
  steps: 40
  target_eval_loss: null
adapter: {{}}
"""


def write_run(
    folder: Path,
    *,
    rate: float = 1e-3,
    seed: int = 0,
    steps: int = 40,
    status: str = "finished",
    created: str = "2026-03-04T12:00:00Z",
    notes: str = "''",
    **facts: object,
) -> Path:
    """Write a run whose loss falls faster the nearer the learning rate is to 1e-3."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(rate=rate, seed=seed, notes=notes))
    floor = 2 + (math.log10(rate) + 3) ** 2
    (folder / "metrics.jsonl").write_text("".join(metrics_lines(step, floor) for step in range(1, steps + 1)))
    (folder / "log.txt").write_text(f"2026-03-04 12:00:00 INFO begin\n2026-03-04 12:01:00 INFO end of {folder.name}\n")
    value = {"name": "eval/loss", "value": floor + 5 / steps + 0.5}
    session = {"started": created, "ended": created, "status": status, "reason": None, "seconds": 60.0}
    defaults = {
        "name": folder.name,
        "task": "pretrain",
        "status": status,
        "reason": "all done" if status == "finished" else None,
        "created": created,
        "updated": created,
        "finished": created,
        "command": ["maxhydra", f"optimizer.learning_rate={rate}"],
        "overrides": [f"optimizer.learning_rate={rate}", f"run.name={folder.name}"],
        "folder": str(folder.parent),
        "host": socket.gethostname(),
        "choices": {"model": "tiny", "optimizer": "adamw", "adapter": "none"},
        "tags": [],
        "notes": "",
        "devices": "1 x cpu",
        "packages": {"jax": "0.10.2"},
        "git": {"sha": "a" * 40, "branch": "main", "dirty": False},
        "objective": value if status == "finished" else None,
        "sessions": [{**session, "host": socket.gethostname(), "pid": 1, "pid_started": "0"}],
    }
    (folder / "run.json").write_text(json.dumps({**defaults, **facts}))
    return folder


def metrics_lines(step: int, floor: float) -> str:
    row = {"step": step, "loss": floor + 5 / step, "learning_rate": 1e-3, "tokens_per_second": 5000.0 + step}
    eval_line = json.dumps({"step": step, "eval/loss": floor + 5 / step + 0.5}) + "\n" if step % 10 == 0 else ""
    return json.dumps(row) + "\n" + eval_line


def change_facts(folder: Path, **facts: object) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
