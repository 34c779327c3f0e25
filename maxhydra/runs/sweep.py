"""sweep.html: a self-contained report of many runs, and which of their settings made the difference.

Trials that a search has pruned ended earlier than others: the values of settings are compared at the last step that all
of them reached.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxhydra import __version__
from maxhydra.record import scan_metrics, series
from maxhydra.record.atomic_io import replace_file
from maxhydra.runs.compare import differing_keys
from maxhydra.runs.curves import compare_charts, encode
from maxhydra.runs.importance import MIN_RUNS, importance
from maxhydra.runs.page import (
    Html,
    concat,
    copy_box,
    curve_controls,
    element,
    figure_frame,
    head_row,
    page,
    scrolling,
    section,
)
from maxhydra.runs.query import rank_runs
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.report import figure
from maxhydra.runs.rerun import rerun_command
from maxhydra.runs.settings import Cell
from maxhydra.runs.summary import KeyNumber, format_cell, format_duration, format_number, format_time

# Number of best runs with curves, in the table, and in the comparison of configs.
MAX_CURVES, MAX_RANKED, MAX_COMPARED = 60, 20, 5
# Points of one chart, summed over its lines.
POINTS = 30_000
# Number of shades from the best run to the worst; the style has a class for each.
SHADES = 8


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs, best first, then those without a result; their settings, and which of these vary."""

    title: str
    metric: str
    largest: bool
    runs: list[Run]
    values: dict[int, float]
    settings: dict[int, dict[str, Cell]]
    varied: list[str]
    step: int | None
    """Last step that all trials reached, if some were pruned; None if all ended at the same step."""
    compared: dict[int, float]
    """Results at this step."""

    @property
    def compared_metric(self) -> str:
        return self.metric if self.step is None else f"{self.metric} at step {self.step}"

    @property
    def ranked(self) -> list[Run]:
        return [run for run in self.runs if run.id in self.values]

    @property
    def measured(self) -> list[Run]:
        """Runs with a finite result to compare."""
        return [run for run in self.ranked if math.isfinite(self.compared.get(run.id, math.nan))]

    def shade(self, run: Run) -> int:
        """Shade index of a run, 0 for the best."""
        ranked = self.ranked
        return ranked.index(run) * SHADES // max(1, len(ranked)) if run.id in self.values else SHADES - 1


def write_sweep_report(
    registry: Registry, runs: Sequence[Run], path: Path, *, title: str, metric: str | None, largest: bool | None = None
) -> Path:
    """Write the page from the current state on disk; runs may still be running."""
    sweep = read_sweep(registry, runs, title=title, metric=metric, largest=largest)
    replace_file(path, sweep_page(registry, sweep))
    return path


def sweep_page(registry: Registry, sweep: Sweep) -> str:
    """The page of a sweep, self-contained."""
    charts = _charts(registry, sweep)
    body = concat(
        element(
            "main",
            _header(sweep),
            element("dl", *map(figure, _figures(sweep)), class_="figures"),
            _coordinates(sweep),
            _curves(charts, sweep),
            _importance(sweep),
            _table(registry, sweep),
            _differences(sweep),
        ),
        element(
            "footer", element("span", f"{registry.root.name}/{sweep.title}"), element("span", f"maxhydra {__version__}")
        ),
    )
    data = {"axes": sweep_axes(sweep), "lines": sweep_lines(sweep), "charts": charts, "largest": sweep.largest}
    return page(sweep.title, body, name="sweep", data=data)


def read_sweep(
    registry: Registry, runs: Sequence[Run], *, title: str, metric: str | None, largest: bool | None
) -> Sweep:
    """Rank the runs by a metric (None: their objective), and find the settings in which they differ."""
    name, ranked, largest = rank_runs(registry, runs, metric, largest=largest)
    results = registry.values(name, ranked)
    # Pruned runs were worse than others at the same step, whatever their last value.
    ranked = sorted(ranked, key=lambda run: run.status == "pruned")
    ranked_ids = {run.id for run in ranked}
    ordered = [*ranked, *(run for run in runs if run.id not in ranked_ids)]
    settings = registry.settings(run.id for run in ordered)
    varied = differing_keys(list(settings.values()))
    values = {run.id: results[run.id] for run in ranked}
    step, compared = _at_equal_steps(registry, ranked, name, values)
    return Sweep(title, name, largest, ordered, values, settings, varied, step, compared)


def _at_equal_steps(
    registry: Registry, runs: Sequence[Run], metric: str, values: dict[int, float]
) -> tuple[int | None, dict[int, float]]:
    """The last step at which all finished and pruned runs have a value of the metric, and the values by then.

    Without pruned runs, the step is None, and the values are the last ones.
    """
    if not any(run.status == "pruned" for run in runs):
        return None, values
    rows = {run: scan_metrics(registry.directory(run).metrics_path).rows for run in runs}
    curves = {run: [*zip(*series(rows[run], metric), strict=True)] for run in runs}
    ended = [curve for run, curve in curves.items() if curve and run.status in ("finished", "pruned")]
    step = min(curve[-1][0] for curve in ended)
    reached = {run.id: [value for at, value in curve if at <= step] for run, curve in curves.items()}
    return step, {id: found[-1] for id, found in reached.items() if found}


def _header(sweep: Sweep) -> Html:
    counts = {
        status: sum(run.status == status for run in sweep.runs)
        for status in dict.fromkeys(r.status for r in sweep.runs)
    }
    statuses = [element("span", f"{count} {status}", class_=f"status {status}") for status, count in counts.items()]
    started = min(run.created for run in sweep.runs)
    about = [f"{sweep.metric}, {'larger' if sweep.largest else 'smaller'} is better", f"since {format_time(started)}"]
    return element(
        "header",
        element("p", *statuses, class_="eyebrow"),
        element("h1", sweep.title),
        element("p", *(element("span", item) for item in about), class_="about"),
    )


def _figures(sweep: Sweep) -> list[KeyNumber]:
    ranked = sweep.ranked
    items = [KeyNumber("Runs", str(len(sweep.runs)), f"{len(ranked)} with a result")]
    if ranked:
        first, last = sweep.values[ranked[0].id], sweep.values[ranked[-1].id]
        items = [KeyNumber(f"Best {sweep.metric}", format_number(first), ranked[0].path.rpartition("/")[2]), *items]
        items.append(KeyNumber("Worst", format_number(last), ranked[-1].path.rpartition("/")[2]))
    items.append(KeyNumber("Settings varied", str(len(sweep.varied))))
    total = sum(run.seconds for run in sweep.runs)
    return [*items, KeyNumber("Wall time", format_duration(total), "total of all runs")]


def sweep_axes(sweep: Sweep) -> list[dict[str, Any]]:
    """Varied settings and the result; the script determines which are numeric."""
    names = [name.rpartition(".")[2] if _is_unique(name, sweep.varied) else name for name in sweep.varied]
    return [
        *({"name": name, "full": full} for name, full in zip(names, sweep.varied, strict=True)),
        {"name": sweep.compared_metric},
    ]


def _is_unique(name: str, names: Sequence[str]) -> bool:
    return sum(other.rpartition(".")[2] == name.rpartition(".")[2] for other in names) == 1


def sweep_lines(sweep: Sweep) -> list[dict[str, Any]]:
    """One line of the parallel coordinates for each run with a result, best first."""
    return [
        {
            "run": run.path.rpartition("/")[2],
            "path": run.path,
            "shade": sweep.shade(run),
            "values": [*(sweep.settings[run.id].get(key) for key in sweep.varied), sweep.compared[run.id]],
        }
        for run in sweep.measured
    ]


def _charts(registry: Registry, sweep: Sweep) -> list[dict[str, Any]]:
    shown = (sweep.ranked or sweep.runs)[:MAX_CURVES]
    # The best run is drawn last, on top of the others.
    rows = {run.path: scan_metrics(registry.directory(run).metrics_path).rows for run in reversed(shown)}
    looks = {run.path: f"s{sweep.shade(run)}" if len(shown) > SHADES else None for run in shown}
    points = max(50, POINTS // max(1, len(shown)))
    return [
        {
            **chart.style,
            "title": chart.title,
            "metric": chart.lines[0].metric,
            "lines": [
                {**encode(line, points), "name": line.name.rpartition("/")[2], "look": looks[line.name]}
                for line in chart.lines
            ],
        }
        for chart in compare_charts(rows)
    ]


def _coordinates(sweep: Sweep) -> Html | None:
    if not sweep.varied or not sweep.measured:
        return None
    label = f"Parallel coordinates of {', '.join(sweep.varied)} and {sweep.compared_metric}, one line per run"
    plot = element("div", class_="parallel", id="parallel", role="img", aria_label=label, tabindex="0")
    return section("Settings and results", plot, element("p", class_="under", id="parallel-readout"))


def _curves(charts: Sequence[dict[str, Any]], sweep: Sweep) -> Html:
    if not charts:
        return section("Curves", element("p", "No metrics were written.", class_="empty"))
    first = next((index for index, chart in enumerate(charts) if chart["metric"] == sweep.metric), 0)
    options = [
        element("option", chart["title"], value=str(index), selected=index == first)
        for index, chart in enumerate(charts)
    ]
    choice = element("label", "Metric", element("select", *options, id="metric"), class_="check")
    many = f" (the best {MAX_CURVES})" if len(sweep.ranked) > MAX_CURVES else ""
    frame = figure_frame("", label=f"Curves of {min(MAX_CURVES, len(sweep.runs))} runs", number=0, wide=True)
    return section(f"Curves{many}", element("div", frame, class_="charts"), aside=curve_controls(choice))


def sweep_importance(sweep: Sweep) -> dict[str, float]:
    """Share of the variance of the results that each varied setting explains; empty with too few results."""
    measured = sweep.measured
    columns = {key: [sweep.settings[run.id].get(key) for run in measured] for key in sweep.varied}
    return importance(columns, [sweep.compared[run.id] for run in measured])


def _importance(sweep: Sweep) -> Html | None:
    shares = sweep_importance(sweep)
    if not shares:
        reason = f"Needs at least {MIN_RUNS} results." if sweep.varied else "No setting was varied."
        return section("Importance", element("p", reason, class_="empty"))
    rows = [
        element(
            "tr",
            element("th", element("code", key), scope="row"),
            element("td", element("meter", min="0", max="1", value=f"{share:.4f}"), class_="bar-cell"),
            element("td", f"{share:.0%}", class_="figure"),
        )
        for key, share in shares.items()
    ]
    metric = sweep.compared_metric
    caption = f"Share of the variance of {metric} that each setting explains, corrected for chance."
    table = element("table", element("tbody", *rows), class_="importance")
    return section("Importance", element("p", caption, class_="under"), scrolling(table))


def _table(registry: Registry, sweep: Sweep) -> Html | None:
    ranked = sweep.ranked[:MAX_RANKED]
    if not ranked:
        return None
    commands = [rerun_command(registry.facts(run)) for run in ranked]
    rows = [
        element(
            "tr",
            element("td", str(rank), class_="figure"),
            element("td", run.path.rpartition("/")[2]),
            element("td", format_number(sweep.values[run.id]), class_="figure"),
            *(element("td", format_cell(sweep.settings[run.id].get(key)), class_="figure") for key in sweep.varied),
            element("td", format_duration(run.seconds), class_="figure"),
            element("td", element("span", run.status, class_=f"status {run.status}")),
            element("td", element("code", command, id=f"command-{rank}"), class_="again"),
            element("td", element("button", "Copy", type="button", data_copy=f"command-{rank}")),
        )
        for rank, (run, command) in enumerate(zip(ranked, commands, strict=True), start=1)
    ]
    names = ["", "Run", sweep.metric, *sweep.varied, "Time", "Status", "Command", ""]
    table = scrolling(element("table", head_row(names), element("tbody", *rows), class_="ranked"))
    return section("Best runs", copy_box(commands[0], "best-command"), table)


def _differences(sweep: Sweep) -> Html | None:
    shown = sweep.runs[:MAX_COMPARED]
    if len(shown) < 2:
        return None
    keys = differing_keys([sweep.settings[run.id] for run in shown])
    rows = [
        element(
            "tr",
            element("th", element("code", key), scope="row"),
            *(element("td", format_cell(sweep.settings[run.id].get(key)), class_="figure") for run in shown),
        )
        for key in keys
    ]
    if not rows:
        return section("Config", element("p", f"The best {len(shown)} runs have the same config.", class_="empty"))
    names = ["", *(run.path.rpartition("/")[2] for run in shown)]
    table = scrolling(element("table", head_row(names), element("tbody", *rows), class_="ranked"))
    return section(f"Differences in the config of the best {len(shown)}", table)
