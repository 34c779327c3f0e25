"""Statistics of layers (train/statistics.py) in the report, as heat maps of layers over steps, and as a table."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from maxhydra.record.facts import STATISTICS
from maxhydra.record.metrics import Row, read_metrics
from maxhydra.runs.page import Html, element, section
from maxhydra.runs.summary import format_number

COLUMNS = ("statistic", "part", "smallest", "layer", "median", "largest", "layer")
# Largest number of columns and rows of a heat map; of several steps or layers in a cell, the largest value counts.
STEPS, ROWS = 60, 64
LEVELS = 10
# Ratio of the largest to the smallest value from which colours follow the logarithm.
LOGARITHMIC = 10.0
_NAME = re.compile(r"(.+)/([^/]+)/(\d+)")

# By layer or first position of a bucket, the value of each recorded step; NaN if it is missing.
Grid = dict[int, list[float]]


def read_statistics(run: Path) -> list[Row]:
    """The records of a run; empty if it has none."""
    return read_metrics(run / STATISTICS)


def layer_grids(rows: Sequence[Row]) -> dict[tuple[str, str], Grid]:
    """Values of all steps by (statistic, part) and layer."""
    found: dict[tuple[str, str], Grid] = defaultdict(dict)
    names = dict.fromkeys(name for row in rows for name in row)
    for name, match in ((name, _NAME.fullmatch(name)) for name in names):
        if match:
            found[match[1], match[2]][int(match[3])] = [float(row.get(name, math.nan)) for row in rows]
    return {key: dict(sorted(grid.items())) for key, grid in sorted(found.items())}


def summary_rows(row: Row) -> list[tuple[str, ...]]:
    """The smallest, median and largest value over the layers of one record, with the layers."""
    table: list[tuple[str, ...]] = []
    for (statistic, part), grid in layer_grids([row]).items():
        ranked = sorted((series[0], layer) for layer, series in grid.items() if math.isfinite(series[0]))
        bad = f"{len(grid) - len(ranked)} not finite" if len(ranked) < len(grid) else ""
        if not ranked:
            table.append((statistic, part, "", "", "", bad, ""))
            continue
        (low, low_layer), (high, high_layer) = ranked[0], ranked[-1]
        median = statistics.median(value for value, _ in ranked)
        cells = (format_number(low), str(low_layer), format_number(median), bad or format_number(high), str(high_layer))
        table.append((statistic, part, *cells))
    return table


def statistics_section(run: Path) -> Html:
    """The section of the report; empty for a run without statistics."""
    rows = read_statistics(run)
    if not rows:
        return Html()
    maps = [_heat_map(f"{statistic} {part}", grid, rows) for (statistic, part), grid in layer_grids(rows).items()]
    steps = f"Layers from top to bottom, or positions in documents; steps {rows[0]['step']} to {rows[-1]['step']}."
    return section("Layers", element("p", steps), element("div", *maps, class_="heats"))


def _heat_map(title: str, grid: Grid, rows: Sequence[Row]) -> Html:
    columns = _bins(len(rows), STEPS)
    lines = _bins(len(grid), ROWS)
    series = list(grid.values())
    cells = [[_largest(series[line][step] for line in span for step in bin) for bin in columns] for span in lines]
    finite = [value for line in cells for value in line if math.isfinite(value)]
    if not finite:
        return element("figure", element("figcaption", f"{title}: not finite"))
    low, high = min(finite), max(finite)
    is_log = low > 0 and high / low >= LOGARITHMIC
    paths: dict[str, list[str]] = defaultdict(list)
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            level = str(_level(value, low, high, is_log=is_log)) if math.isfinite(value) else "bad"
            paths[level].append(f"M{x} {y}h1v1h-1z")
    shapes = [element("path", d="".join(parts), class_=f"level{level}") for level, parts in sorted(paths.items())]
    label = f"{title}: {format_number(low)} to {format_number(high)}{', logarithmic' if is_log else ''}"
    box = f"0 0 {len(columns)} {len(lines)}"
    options = {"viewBox": box, "role": "img", "aria_label": label, "preserveAspectRatio": "none"}
    return element("figure", element("figcaption", label), element("svg", *shapes, **options))


def _bins(count: int, limit: int) -> list[range]:
    """Indices 0 to count - 1 in at most `limit` consecutive ranges of nearly equal length."""
    number = min(count, limit)
    return [range(index * count // number, (index + 1) * count // number) for index in range(number)]


def _largest(values: Iterable[float]) -> float:
    """The largest value; NaN if any is NaN."""
    known = list(values)
    return math.nan if any(map(math.isnan, known)) else max(known)


def _level(value: float, low: float, high: float, *, is_log: bool) -> int:
    if low == high:
        return 0
    share = math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)
    return min(LEVELS - 1, int(LEVELS * share))
