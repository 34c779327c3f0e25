"""Plot metrics of run folders as an SVG file, for the pages of docs/recipes.

    python scripts/curve_svg.py OUT.svg RUN:METRIC [RUN:METRIC ...] [--title TEXT]

Example: python scripts/curve_svg.py docs/images/recipes/pretrain.svg outputs/base:loss outputs/base:eval/loss
"""

import argparse
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from maxhydra.record import series
from maxhydra.record.metrics import read_metrics
from maxhydra.runs.curves import decimate

WIDTH, HEIGHT = 640, 300
MARGIN_X, MARGIN_END, TOP, BOTTOM = 56, 16, 40, 32
# Readable on white, also by color-blind readers (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MAX_POINTS = 200
STYLE = "text{font:12px system-ui,sans-serif;fill:#333}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.8}"

Points = list[tuple[float, float]]


def read_points(folder: Path, metric: str) -> Points:
    """Steps and finite values of a metric."""
    steps, values = series(read_metrics(folder / "metrics.jsonl"), metric)
    if not values:
        raise SystemExit(f"{folder}: no metric {metric}")
    steps, values = decimate(steps, values, MAX_POINTS)
    return [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    raw = (high - low) / count or 1.0
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [index * step for index in range(first, last + 1)]


class Scale:
    """Maps values of an interval to pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        self.low, self.high = min(values), max(values)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1.0)
        return round(self._start + share * (self._end - self._start), 1)


def plot(lines: dict[str, Points], title: str) -> str:
    """The SVG file of a few curves over the steps."""
    every = [point for points in lines.values() for point in points]
    x = Scale([0.0, *(step for step, _ in every)], MARGIN_X, WIDTH - MARGIN_END)
    y = Scale([value for _, value in every], HEIGHT - BOTTOM, TOP)
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', f"<style>{STYLE}</style>"]
    for value in ticks(y.low, y.high):
        parts.append(f'<line class="grid" x1="{MARGIN_X}" x2="{WIDTH - MARGIN_END}" y1="{y(value)}" y2="{y(value)}"/>')
        label = f"{value:.6g}"
        parts.append(f'<text x="{MARGIN_X - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
    for step in ticks(x.low, x.high, 6):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - 12}" text-anchor="middle">{step:,.0f}</text>')
    offset = MARGIN_X
    for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
        path = " ".join(f"{x(step)},{y(value)}" for step, value in points)
        dots = "".join(f'<circle cx="{x(s)}" cy="{y(v)}" r="2.5" fill="{colour}"/>' for s, v in points)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>{dots if len(points) < 20 else ""}')
        parts.append(f'<circle cx="{offset + 5}" cy="18" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{offset + 14}" y="22">{escape(name)}</text>')
        offset += 30 + 7 * len(name)
    heading = f"<title>{escape(title or ', '.join(lines))}</title>"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{heading}{"".join(parts)}</svg>\n'


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("curves", nargs="+", metavar="RUN:METRIC")
    parser.add_argument("--title", default="")
    args = parser.parse_args(arguments)
    if len(args.curves) > len(COLOURS):
        parser.error(f"at most {len(COLOURS)} curves")
    runs = [curve.partition(":")[::2] for curve in args.curves]
    is_one_run = len({folder for folder, _ in runs}) == 1
    lines = {
        metric if is_one_run else f"{Path(folder).name} {metric}": read_points(Path(folder), metric)
        for folder, metric in runs
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(plot(lines, args.title), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
