"""sweep.html: a self-contained report of many runs, and which of their settings made the difference.

The importance of a setting is the share of the result's variance that it explains on its own.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxhydra import __version__
from maxhydra.record import scan_metrics
from maxhydra.record.atomic_io import replace_file
from maxhydra.runs.compare import differing_keys
from maxhydra.runs.curves import compare_charts, encode
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

# Minimum number of runs for a meaningful estimate.
MIN_RUNS = 4


def importance(settings: Mapping[str, Sequence[Cell | None]], results: Sequence[float]) -> dict[str, float]:
    """Share of the variance of the results that each setting explains, largest first.

    One-way analysis of variance with Kelley's epsilon squared, (SS_between - (k - 1) MS_within) / SS_total: unlike the
    plain ratio, it is near 0 for a setting unrelated to the result, however many values it takes. A setting with many
    values is binned into groups of equal size first. Interactions between settings are not detected.
    """
    if len(results) < MIN_RUNS:
        return {}
    shares = {name: _share(_groups(values), results) for name, values in settings.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _groups(values: Sequence[Cell | None]) -> list[int]:
    """Group index of each value: one group per recurring value, or about sqrt(n) groups of equal size."""
    distinct = sorted(set(values), key=_rank)
    if len(distinct) <= max(2, len(values) // 2):
        return [distinct.index(value) for value in values]
    count = max(2, math.isqrt(len(values)))
    ranking = sorted(range(len(values)), key=lambda index: _rank(values[index]))
    group = {index: rank * count // len(values) for rank, index in enumerate(ranking)}
    return [group[index] for index in range(len(values))]


def _rank(value: Cell | None) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def _share(groups: Sequence[int], results: Sequence[float]) -> float:
    members: dict[int, list[float]] = {}
    for group, result in zip(groups, results, strict=True):
        members.setdefault(group, []).append(result)
    mean = math.fsum(results) / len(results)
    total = math.fsum((result - mean) ** 2 for result in results)
    within = math.fsum((x - math.fsum(group) / len(group)) ** 2 for group in members.values() for x in group)
    freedom = len(results) - len(members)
    if total == 0 or freedom <= 0:
        return 0.0
    return max(0.0, (total - within - (len(members) - 1) * within / freedom) / total)


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

    @property
    def ranked(self) -> list[Run]:
        return [run for run in self.runs if run.id in self.values]

    @property
    def measured(self) -> list[Run]:
        """Runs with a finite result."""
        return [run for run in self.ranked if math.isfinite(self.values[run.id])]

    def shade(self, run: Run) -> int:
        """Shade index of a run, 0 for the best."""
        ranked = self.ranked
        return ranked.index(run) * SHADES // max(1, len(ranked)) if run.id in self.values else SHADES - 1


def write_sweep_report(
    registry: Registry, runs: Sequence[Run], path: Path, *, title: str, metric: str | None, largest: bool
) -> Path:
    """Write the page from the current state on disk; runs may still be running."""
    sweep = _sweep(registry, runs, title, metric, largest)
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
        element("footer", element("span", f"{registry.root.name}/{title}"), element("span", f"maxhydra {__version__}")),
    )
    data = {"axes": _axes(sweep), "lines": _lines(sweep), "charts": charts, "largest": largest}
    replace_file(path, page(title, body, name="sweep", data=data))
    return path


def _sweep(registry: Registry, runs: Sequence[Run], title: str, metric: str | None, largest: bool) -> Sweep:
    name, ranked = rank_runs(registry, runs, metric, largest=largest)
    results = registry.values(name, ranked)
    ranked_ids = {run.id for run in ranked}
    ordered = [*ranked, *(run for run in runs if run.id not in ranked_ids)]
    settings = registry.settings(run.id for run in ordered)
    varied = differing_keys(list(settings.values()))
    return Sweep(title, name, largest, ordered, {run.id: results[run.id] for run in ranked}, settings, varied)


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


def _axes(sweep: Sweep) -> list[dict[str, Any]]:
    """Varied settings and the result; the script determines which are numeric."""
    names = [name.rpartition(".")[2] if _is_unique(name, sweep.varied) else name for name in sweep.varied]
    return [
        *({"name": name, "full": full} for name, full in zip(names, sweep.varied, strict=True)),
        {"name": sweep.metric},
    ]


def _is_unique(name: str, names: Sequence[str]) -> bool:
    return sum(other.rpartition(".")[2] == name.rpartition(".")[2] for other in names) == 1


def _lines(sweep: Sweep) -> list[dict[str, Any]]:
    return [
        {
            "run": run.path.rpartition("/")[2],
            "shade": sweep.shade(run),
            "values": [*(sweep.settings[run.id].get(key) for key in sweep.varied), sweep.values[run.id]],
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
    label = f"Parallel coordinates of {', '.join(sweep.varied)} and {sweep.metric}, one line per run"
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


def _importance(sweep: Sweep) -> Html | None:
    measured = sweep.measured
    columns = {key: [sweep.settings[run.id].get(key) for run in measured] for key in sweep.varied}
    shares = importance(columns, [sweep.values[run.id] for run in measured])
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
    caption = f"Share of the variance of {sweep.metric} that each setting explains on its own, corrected for chance."
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
