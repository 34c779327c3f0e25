"""Evaluations of a run for the dashboard: metrics eval/* by step, and grids of needle tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import read_json
from maxhydra.record.metrics import Row

# Results of task=eval in the folder of a run.
EVAL_FILE = "eval.json"
# Evaluations in a table; of more, evenly spaced ones up to the last.
MAX_EVALUATIONS = 12


def evaluation_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Steps of evaluations, and the values of each metric eval/* at these steps; None where it was not logged."""
    by_step: dict[int, Row] = {}
    for row in rows:
        if found := {name: value for name, value in row.items() if name.startswith("eval/")}:
            by_step[row["step"]] = {**by_step.get(row["step"], {}), **found}
    stride = max(1, -(-len(by_step) // MAX_EVALUATIONS))
    steps = sorted(by_step)[::-1][::stride][::-1]
    names = dict.fromkeys(name for step in steps for name in by_step[step])
    return {"steps": steps, "metrics": {name: [by_step[step].get(name) for step in steps] for name in names}}


def read_grids(run: Path) -> list[dict[str, Any]]:
    """Accuracy by context length and depth of needle tasks, of every evaluated checkpoint."""
    try:
        return [
            {"title": f"{task}, {name}", "cells": result["grid"]}
            for name, tasks in read_json(run / EVAL_FILE).items()
            for task, result in tasks.items()
            if result.get("grid")
        ]
    except (OSError, ValueError, AttributeError):
        return []
