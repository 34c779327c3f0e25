"""Pictures of a plan (task=plan) in the report: the mesh over the links, and where time and memory go."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxhydra.runs.page import Html, concat, copy_box, element, section
from maxhydra.runs.summary import format_duration, format_number

FILE = "plan.json"
WIDTH, BAR, GAP = 1060, 34, 8
# Parts of the memory in the order of the bar, for plans of older versions; newer ones store what exists at the peak.
MEMORY = {
    "weights": "weights",
    "optimizer": "optimizer",
    "cast_weights": "cast weights",
    "gradients": "gradients",
    "activations": "activations",
    "layer": "layer in work",
    "gathered": "gathered weights",
    "loss": "logits and head",
}
CELL, MOST = 22, 16


def plan_section(folder: Path) -> Html:
    """The section of the report; empty for a run without a plan."""
    try:
        plan: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Html()
    used: dict[str, float] = plan.get("bytes_per_device", {})
    stored = plan.get("memory_parts") or {name: used.get(key, 0.0) for key, name in MEMORY.items()}
    memory = {name: count / 2**30 for name, count in stored.items()}
    parts: dict[str, float] = plan.get("parts", {})
    step = plan.get("step") or {}
    seconds = f"{format_duration(step['seconds'])} a step, MFU {step['mfu']:.1%}" if step else ""
    limit = used.get("limit")
    fits = "" if limit is None else f" of {limit / 2**30:.0f} GiB: {'fits' if plan['fits'] else 'does not fit'}"
    return section(
        "Plan",
        element("h3", f"Mesh of {plan['devices']:,} devices"),
        _mesh(plan.get("mesh", {})),
        concat(element("h3", f"Time: {seconds}"), _bar(parts, unit="s")) if parts else None,
        element("h3", f"Memory per device: {used.get('peak', 0) / 2**30:.1f} GiB{fits}"),
        _bar(memory, unit="GiB"),
        element("ul", *(element("li", str(line)) for line in plan.get("advice", []))) if plan.get("advice") else None,
        copy_box(str(plan["command"]), "command") if plan.get("command") else None,
    )


def _svg(height: int, label: str, *children: Html) -> Html:
    box = f"0 0 {WIDTH} {height}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label, class_="plan")


def _text(x: float, y: float, text: str, class_: str = "") -> Html:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_ or None)


def _rect(x: float, y: float, width: float, height: float, class_: str, title: str) -> Html:
    return element(
        "rect",
        element("title", title),
        x=f"{x:.1f}",
        y=f"{y:.1f}",
        width=f"{max(width, 0):.1f}",
        height=f"{height:.1f}",
        class_=class_,
    )


def _bar(parts: Mapping[str, float], *, unit: str) -> Html:
    """A bar split by parts, with a legend below."""
    total = sum(parts.values()) or 1.0
    shapes: list[Html] = []
    start = 0.0
    shown = [(name, value) for name, value in parts.items() if value > 0]
    for index, (name, value) in enumerate(shown):
        width = WIDTH * value / total
        label = f"{name}: {format_number(value)} {unit}, {value / total:.1%}"
        shapes.append(_rect(start, 0, width - 1, BAR, f"part{index % 8}", label))
        column, row = index % 4, index // 4
        x, y = column * WIDTH / 4, BAR + 22 + 22 * row
        shapes += [_rect(x, y - 11, 12, 12, f"part{index % 8}", label), _text(x + 18, y, label)]
        start += width
    rows = -(-len(shown) // 4)
    return _svg(BAR + 14 + 22 * rows, ", ".join(name for name, _ in shown), *shapes)


def _mesh(mesh: Mapping[str, int]) -> Html:
    """A row of devices for each axis, the axis with the fastest links last; long axes are shortened."""
    axes: Sequence[tuple[str, int]] = list(mesh.items()) or [("device", 1)]
    shapes: list[Html] = []
    for row, (axis, size) in enumerate(axes):
        y = row * (CELL + GAP)
        shapes.append(_text(0, y + 16, f"{axis} = {size:,}"))
        shown = min(size, MOST)
        for index in range(shown):
            x = 150 + index * (CELL + 4)
            is_cut = size > MOST and index == shown - 2
            if not is_cut:
                number = size - 1 if index == shown - 1 else index
                shapes += [
                    _rect(x, y, CELL, CELL, f"part{row % 8}", f"{axis} {number}"),
                    _text(x + CELL / 2, y + 15, str(number), "number"),
                ]
            else:
                shapes.append(_text(x + 5, y + 15, "..."))
    return _svg(len(axes) * (CELL + GAP), " x ".join(f"{axis} {size}" for axis, size in axes), *shapes)
