"""Key numbers of a run, and formatting of numbers, durations and times."""

import dataclasses
import datetime
import math
import statistics
from collections.abc import Sequence
from typing import Any

from maxhydra.record.atomic_io import from_number
from maxhydra.record.metrics import Row, series

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class KeyNumber:
    """A number in the header of a report, and a note below it."""

    label: str
    value: str
    note: str = ""


def key_numbers(facts: Facts, rows: Sequence[Row], *, total_steps: int | None) -> list[KeyNumber]:
    """Key numbers that the run has, most important first."""
    candidates = [
        _loss("Eval loss", rows, "eval/loss"),
        _loss("Train loss", rows, "loss"),
        _objective(facts),
        _median("Tokens / s", rows, "tokens_per_second", format_compact),
        _median("MFU", rows, "mfu", "{:.1%}".format),
        _duration(facts),
        _goodput(facts),
        _steps(rows, total_steps),
        KeyNumber("Parameters", format_compact(facts["parameters"])) if facts.get("parameters") else None,
    ]
    return [item for item in candidates if item is not None]


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The productive share of a run's sessions, and the share of everything else, largest first."""

    share: float
    losses: dict[str, float]

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {share:.1%}" for name, share in self.losses.items() if share >= 0.001)


def goodput(facts: Facts) -> Goodput | None:
    """Goodput over all sessions that recorded their time by activity; None if none of them trained.

    Steps that a later session repeated, because it resumed from an earlier checkpoint, are not productive.
    """
    sessions = facts["sessions"]
    recorded = [number for number, session in enumerate(sessions) if session.get("spent") is not None]
    total = sum(session_seconds(sessions[number], facts) for number in recorded)
    if total <= 0 or not any("steps" in sessions[number]["spent"] for number in recorded):
        return None
    productive, losses = 0.0, dict.fromkeys(["lost steps", "init", "other"], 0.0)
    for number in recorded:
        spent, session = dict(sessions[number]["spent"]), sessions[number]
        final = _final_share(session, sessions[number + 1 :])
        steps = spent.pop("steps", 0.0)
        productive += steps * final
        losses["lost steps"] += steps * (1 - final)
        # A session that ended before its first step only initialized.
        rest = "other" if "init" in spent else "init"
        losses[rest] += max(0.0, session_seconds(session, facts) - steps - sum(spent.values()))
        for name, seconds in spent.items():
            losses[name.replace("_", " ")] = losses.get(name.replace("_", " "), 0.0) + seconds
    # The times of a killed session are a few seconds apart.
    total = max(total, productive + sum(losses.values()))
    shares = {name: seconds / total for name, seconds in losses.items()}
    return Goodput(productive / total, dict(sorted(shares.items(), key=lambda item: -item[1])))


def _final_share(session: Facts, later: Sequence[Facts]) -> float:
    """Share of a session's steps that no later session repeated."""
    start, end = session.get("start_step") or 0, session.get("end_step") or 0
    resumed_at = min([step for other in later if (step := other.get("start_step")) is not None], default=end)
    return max(0, min(end, resumed_at) - start) / (end - start) if end > start else 1.0


def _goodput(facts: Facts) -> KeyNumber | None:
    found = goodput(facts)
    return None if found is None else KeyNumber("Goodput", f"{found.share:.1%}", found.text)


def _loss(label: str, rows: Sequence[Row], metric: str) -> KeyNumber | None:
    steps, values = series(rows, metric)
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not values:
        return None
    note = f"best {format_number(min(finite)[0])} at step {min(finite)[1]:,}" if finite else "never finite"
    return KeyNumber(label, format_number(values[-1]), note if len(values) > 1 else "")


def _objective(facts: Facts) -> KeyNumber | None:
    objective = facts.get("objective") or {}
    if objective.get("value") is None or objective["name"] in ("eval/loss", "loss"):
        return None
    return KeyNumber(objective["name"], format_number(from_number(objective["value"])), "objective")


def _median(label: str, rows: Sequence[Row], metric: str, format_value: Any) -> KeyNumber | None:
    """The median, which is robust to start-up and pauses."""
    values = [value for value in series(rows, metric)[1] if math.isfinite(value)]
    if not values:
        return None
    return KeyNumber(label, format_value(statistics.median(values)), "median" if len(values) > 1 else "")


def _duration(facts: Facts) -> KeyNumber:
    timings = facts.get("timings") or {}
    compiling = f"compiling {format_duration(timings['compile'])}" if timings.get("compile") else ""
    return KeyNumber("Wall time", format_duration(wall_seconds(facts)), compiling)


def wall_seconds(facts: Facts) -> float:
    """Total over the sessions; a running or lost session counts until its last update."""
    return sum(session_seconds(session, facts) for session in facts["sessions"])


def session_seconds(session: Facts, facts: Facts) -> float:
    if session.get("seconds") is not None:
        return float(session["seconds"])
    ended = datetime.datetime.fromisoformat(session["ended"] or facts["updated"])
    return (ended - datetime.datetime.fromisoformat(session["started"])).total_seconds()


def _steps(rows: Sequence[Row], total: int | None) -> KeyNumber | None:
    if not rows:
        return None
    return KeyNumber("Steps", f"{rows[-1]['step']:,}", f"of {total:,}" if total else "")


def format_number(value: float) -> str:
    """Format with four significant digits: 2.070, 0.001234, 1.25e-07, 12,345."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:#.4g}" if 0 < abs(value) < 1e3 else f"{value:,.0f}"


def format_cell(value: Any) -> str:
    """Format a setting or a measurement for a table cell; None is empty."""
    match value:
        case None:
            return ""
        case float():
            # Settings such as 0.003 as they were written; measurements with four digits, for alignment.
            return f"{value:g}" if value == float(f"{value:.3g}") else format_number(value)
        case tuple() | list():
            return " ".join(map(str, value))
    return str(value)


def format_compact(value: float) -> str:
    """15210 -> 15.2K, 8030261248 -> 8.03B."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{float(f'{value / size:.3g}'):g}{suffix}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 m 20 s, 2 h 5 m, 3 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {small_unit}"
    return f"{whole} s"


def format_time(text: str) -> str:
    """2026-03-04T12:00:00Z -> 4 Mar 2026, 12:00 UTC."""
    at = datetime.datetime.fromisoformat(text)
    return f"{at.day} {at:%b %Y, %H:%M} UTC"
