"""Curves of a report: which metrics share a chart, and decimation that preserves extremes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.record.metrics import Row, series

POINTS = 2000
# Points between which the other axes are interpolated.
AXIS_POINTS = 500
# Precision of float32: with fewer digits, rounding again for display would disagree with the run's tables.
DIGITS = 7


@dataclasses.dataclass(frozen=True)
class Line:
    """One metric over the steps; values that are not finite are NaN."""

    name: str
    metric: str
    steps: list[int]
    values: list[float]

    @property
    def finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines that share their axes."""

    title: str
    lines: tuple[Line, ...]

    @property
    def style(self) -> dict[str, bool]:
        """Axis options: throughput starts at zero, so that noise is to scale; ratios are shown as percentages."""
        metrics = [line.metric for line in self.lines]
        return {"zero": any(m in _FROM_ZERO for m in metrics), "percent": any(m in _SHARES for m in metrics)}


# Title of a chart -> metric -> name of its line.
_CHARTS: dict[str, dict[str, str]] = {
    "Loss": {"loss": "train", "eval/loss": "eval"},
    "Learning rate": {"learning_rate": "learning rate"},
    "Gradient norm": {"grad_norm": "gradient norm"},
    "Tokens per second": {"tokens_per_second": "tokens/s"},
    "Model FLOPs utilization": {"mfu": "MFU"},
    "TFLOP/s per device": {"tflops_per_device": "TFLOP/s"},
    "Device memory (GiB)": {"system/device_memory_gib": "in use", "system/device_memory_peak_gib": "peak"},
    "GPU utilization": {"system/gpu_utilization": "GPUs"},
    "GPU power (W)": {"system/gpu_power_w": "all GPUs"},
    "Host memory of the process (GiB)": {"system/host_rss_gib": "resident"},
    "Network of the host (MiB/s)": {"system/network_received_mib_s": "received", "system/network_sent_mib_s": "sent"},
    "Host": {"system/cpu_share": "CPU of the process", "system/host_memory_share": "memory in use"},
}
_SYSTEM_USAGE = tuple(metric for lines in _CHARTS.values() for metric in lines if metric.startswith("system/"))
_FROM_ZERO = ("tokens_per_second", "mfu", "tflops_per_device", *_SYSTEM_USAGE)
_SHARES = ("mfu", "system/gpu_utilization", "system/cpu_share", "system/host_memory_share")
# Metrics without noise, which smoothing would distort.
_EXACT = ("learning_rate", "eval/")
# Metrics that duplicate one above, or are not worth plotting.
_NOT_PLOTTED = ("step", "tokens", "skipped", "step_time", "input_wait", "eval/tokens", "eval/perplexity")


def charts(rows: Sequence[Row]) -> list[Chart]:
    """Charts of one run that have data: those of `_CHARTS` in order, then one per other metric."""
    seen = dict.fromkeys(name for row in rows for name in row if name not in _NOT_PLOTTED)
    if "mfu" in seen:
        seen.pop("tflops_per_device", None)  # The same curve in a different unit.
    known = {metric for lines in _CHARTS.values() for metric in lines}
    others = {name: {name: name} for name in seen if name not in known}
    return [
        Chart(title, tuple(_line(rows, metric, name) for metric, name in lines.items() if metric in seen))
        for title, lines in {**_CHARTS, **others}.items()
        if any(metric in seen for metric in lines)
    ]


# Titles of charts that show one metric of several runs.
_TITLES = {"loss": "Train loss", "eval/loss": "Eval loss"} | {
    metric: title for title, lines in _CHARTS.items() for metric in lines if len(lines) == 1
}
# Metrics of the machine, not of the model.
_SYSTEM = ("tokens_per_second", "mfu", "tflops_per_device", "step_time", "input_wait")


def compare_charts(runs: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """One chart per metric with one line per run that has it, well-known metrics first."""
    seen = dict.fromkeys(name for rows in runs.values() for row in rows for name in row)
    known = [*("eval/loss", "loss"), *_TITLES, *_SYSTEM]
    names = [
        name
        for name in dict.fromkeys([*known, *seen])
        if name in seen and (name not in _NOT_PLOTTED or is_system(name))
    ]
    result = [
        Chart(
            _TITLES.get(metric, metric),
            tuple(_line(rows, metric, run) for run, rows in runs.items() if any(metric in row for row in rows)),
        )
        for metric in names
    ]
    # Constant lines, such as a count of skipped records, come last.
    return sorted(result, key=lambda chart: len({value for line in chart.lines for value in line.values}) == 1)


def step_axes(rows: Sequence[Row], devices: int) -> dict[str, list[float]]:
    """Tokens, seconds and FLOPs of training up to each logged step, for axes other than the step.

    Seconds are those of training steps, without compilation, evaluation and checkpoints; FLOPs are the model's.
    """
    axes: dict[str, list[float]] = {"steps": [0], "tokens": [0], "seconds": [0], "flops": [0]}
    for row in rows:
        count = row["step"] - axes["steps"][-1]
        if "step_time" not in row or count <= 0 or not math.isfinite(row["step_time"]):
            continue
        seconds = row["step_time"] * count
        rates = {"tokens": row.get("tokens_per_second", 0), "seconds": 1}
        rates["flops"] = row.get("tflops_per_device", 0) * 1e12 * devices
        axes["steps"].append(row["step"])
        for name, rate in rates.items():
            axes[name].append(float(f"{axes[name][-1] + rate * seconds:.12g}"))
    stride = max(1, len(axes["steps"]) // AXIS_POINTS)
    return {name: [*values[:-1:stride], values[-1]] for name, values in axes.items()}


def is_system(metric: str) -> bool:
    return metric in _SYSTEM or metric.startswith(("memory", "system/"))


def _line(rows: Sequence[Row], metric: str, name: str) -> Line:
    steps, values = series(rows, metric)
    return Line(name, metric, steps, [float(value) for value in values])


def decimate(steps: Sequence[int], values: Sequence[float], limit: int) -> tuple[list[int], list[float]]:
    """Reduce to about `limit` points: both ends, and the minimum, maximum and first NaN of each bin."""
    if len(values) <= limit:
        return list(steps), list(values)
    num_bins = max(1, limit // 2)
    indices = {0, len(values) - 1}
    for number in range(num_bins):
        inside = range(number * len(values) // num_bins, (number + 1) * len(values) // num_bins)
        finite = [i for i in inside if math.isfinite(values[i])]
        if finite:
            indices |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(inside):
            indices.add(next(i for i in inside if not math.isfinite(values[i])))
    ordered = sorted(indices)
    return [steps[i] for i in ordered], [values[i] for i in ordered]


def encode(line: Line, points: int = POINTS) -> dict[str, Any]:
    """Encode for the page: delta-encoded steps, which are shorter, and null for values that are not finite."""
    steps, values = decimate(line.steps, line.values, points)
    return {
        "name": line.name,
        "exact": line.metric.startswith(_EXACT),
        "steps": [after - before for before, after in zip([0, *steps], steps, strict=False)],
        "values": [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values],
    }
