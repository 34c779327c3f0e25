"""Results of task=eval: a table for the terminal, a heat map of needle tasks, and JSON for the run's folder."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from maxhydra.evals.run import Result

# Results by checkpoint and task.
Results = Mapping[str, Mapping[str, Result]]
SHADES = " ░▒▓█"


def table(results: Results) -> Table:
    """One line per task and metric, one column per checkpoint."""
    shown = Table("task", "metric", *results, box=None, pad_edge=False)
    first = next(iter(results.values()))
    for task, result in first.items():
        for metric in result.metrics:
            if metric.endswith("_stderr") or metric == "error":
                continue
            shown.add_row(task, metric, *(_cell(found[task].metrics, metric) for found in results.values()))
    return shown


def _cell(metrics: Mapping[str, float], metric: str) -> str:
    error = metrics.get(f"{metric}_stderr")
    return f"{metrics[metric]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def heat_map(result: Result) -> str:
    """Accuracy by depth (lines) and context length (columns) of a needle task."""
    lengths = sorted({length for length, _ in result.grid})
    depths = sorted({depth for _, depth in result.grid})
    lines = ["depth " + "".join(f"{length:>9}" for length in lengths)]
    for depth in depths:
        cells = [result.grid[length, depth] for length in lengths]
        marks = "".join(f"  {SHADES[round(value * (len(SHADES) - 1))] * 2} {value:4.2f}" for value in cells)
        lines.append(f"{depth:5.2f} {marks}")
    return "\n".join(lines)


def to_json(results: Results) -> dict[str, Any]:
    """All metrics, and the grids of needle tasks, by checkpoint and task."""
    return {
        checkpoint: {
            task: {
                "metrics": result.metrics,
                **({"questions": result.questions} if result.questions else {}),
                **({"grid": [[*cell, value] for cell, value in result.grid.items()]} if result.grid else {}),
            }
            for task, result in tasks.items()
        }
        for checkpoint, tasks in results.items()
    }


def metrics(results: Mapping[str, Result]) -> dict[str, float]:
    """The metrics of one checkpoint by the names that runs log: eval/TASK/METRIC."""
    return {f"eval/{task}/{name}": value for task, result in results.items() for name, value in result.metrics.items()}
