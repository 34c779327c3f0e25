"""Results of task=eval in the report: a table by task and checkpoint, and heat maps of needle tasks."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import parse_json
from maxhydra.runs.page import Html, element, head_row, scrolling, section

FILE = "eval.json"
# Shades of a heat map, from 0 to 1.
SHADES = 5
Results = Mapping[str, Mapping[str, Any]]


def benchmarks_section(run: Path) -> Html:
    """The section of the report; empty if the run has no results, or their file is damaged."""
    try:
        results: Results = parse_json((run / FILE).read_bytes())
        rows = _rows(results)
        maps = [
            _heat_map(task, name, found["grid"]) for name, tasks in results.items() for task, found in _grids(tasks)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Html()
    table = element("table", head_row(["Task", "Metric", *results]), element("tbody", *rows))
    return section("Benchmarks", scrolling(table), *maps)


def _rows(results: Results) -> list[Html]:
    metrics = dict.fromkeys(
        (task, metric) for tasks in results.values() for task, found in tasks.items() for metric in found["metrics"]
    )
    return [
        element(
            "tr",
            element("th", task, scope="row"),
            element("td", metric),
            *(element("td", _cell(tasks.get(task, {}).get("metrics", {}), metric)) for tasks in results.values()),
        )
        for task, metric in metrics
        if not metric.endswith("_stderr") and metric != "error"
    ]


def _cell(metrics: Mapping[str, float], metric: str) -> str:
    if metric not in metrics:
        return ""
    error = metrics.get(f"{metric}_stderr")
    return f"{float(metrics[metric]):.4f}" + ("" if error is None else f" ± {float(error):.4f}")


def _grids(tasks: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(task, found) for task, found in tasks.items() if found.get("grid")]


def _heat_map(task: str, checkpoint: str, grid: list[tuple[int, float, float]]) -> Html:
    """Accuracy by depth (lines) and context length (columns)."""
    cells = {(float(depth), int(length)): float(value) for length, depth, value in grid}
    lengths, depths = sorted({length for _, length in cells}), sorted({depth for depth, _ in cells})
    rows = [
        element(
            "tr",
            element("th", f"{depth:g}", scope="row"),
            *(_shaded(cells.get((depth, length), math.nan)) for length in lengths),
        )
        for depth in depths
    ]
    table = element("table", head_row(["Depth", *map(str, lengths)]), element("tbody", *rows), class_="shaded")
    caption = element("p", f"{task}, {checkpoint}: accuracy by depth and context length in tokens")
    return element("div", caption, scrolling(table))


def _shaded(value: float) -> Html:
    if math.isnan(value):
        return element("td", "")
    level = min(SHADES - 1, int(SHADES * min(max(value, 0.0), 1.0)))
    return element("td", f"{value:.2f}", class_=f"shade{level}")
