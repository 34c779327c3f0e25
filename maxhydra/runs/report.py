"""report.html: a self-contained report of one run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from maxhydra import __version__
from maxhydra.record import RunDirectory, read_metrics
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.redact import redact_facts
from maxhydra.runs.benchmarks import benchmarks_section
from maxhydra.runs.curves import Chart, Line, charts, encode
from maxhydra.runs.page import (
    Html,
    concat,
    copy_box,
    curve_controls,
    element,
    figure_frame,
    head_row,
    page,
    read_asset,
    scrolling,
    section,
)
from maxhydra.runs.plan_picture import plan_section
from maxhydra.runs.profile import profile_section
from maxhydra.runs.rollouts import rollouts_section
from maxhydra.runs.settings import get_setting, list_settings, read_config_text
from maxhydra.runs.statistics import statistics_section
from maxhydra.runs.summary import (
    Facts,
    KeyNumber,
    format_duration,
    format_number,
    format_time,
    key_numbers,
    session_seconds,
)

# Files next to the report that it links to.
_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "statistics.jsonl",
    "log.txt",
    "run.json",
    "plan.json",
    "eval.json",
    "diff.patch",
)
# Packages that affect results; the others are in a collapsed section.
_MAIN_PACKAGES = ("maxhydra", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write_report(run: RunDirectory) -> Path:
    """Write <run>/report.html from run.json, metrics.jsonl and config.yaml, in any state of the run."""
    replace_file(run.report_path, report_page(run))
    return run.report_path


def report_page(run: RunDirectory) -> str:
    """The report of a run, self-contained."""
    facts, rows = redact_facts(run.read()), read_metrics(run.metrics_path)
    config = read_config_text(run.config_path)
    run_charts = charts(rows)
    encoded = [{**chart.style, "lines": [encode(line) for line in chart.lines]} for chart in run_charts]
    body = Template(read_asset("report.html")).substitute(
        header=_header(facts),
        figures=concat(*map(figure, key_numbers(facts, rows, total_steps=get_setting(config, "train.steps")))),
        controls=curve_controls(),
        charts=_charts(run_charts),
        plan=plan_section(run.path),
        benchmarks=benchmarks_section(run.path),
        statistics=statistics_section(run.path),
        profile=profile_section(run.path),
        rollouts=rollouts_section(run.path),
        sample=_sample(facts.get("sample")),
        config=_config(config, facts),
        environment=_environment(facts),
        sessions=_sessions(facts),
        files=_files(run.path),
        version=concat(__version__),
    )
    data = {"charts": encoded, "resumes": _resumes(facts)}
    return page(str(facts["name"]), Html(body), name="report", data=data)


def _resumes(facts: Facts) -> list[int]:
    return [session["start_step"] for session in facts["sessions"][1:] if session.get("start_step")]


def _header(facts: Facts) -> Html:
    status = str(facts["status"])
    about = [
        facts.get("task"),
        (facts.get("choices") or {}).get("model"),
        facts.get("devices"),
        format_time(facts["created"]),
    ]
    why = element("span", str(facts["reason"]), class_="reason") if facts.get("reason") else None
    return concat(
        element("p", element("span", status, class_=f"status {status}"), why, class_="eyebrow"),
        element("h1", str(facts["name"])),
        element("p", *(element("span", str(item)) for item in about if item), class_="about"),
        element("p", str(facts["notes"]), class_="notes") if facts.get("notes") else None,
        element("ul", *(element("li", str(tag)) for tag in facts["tags"]), class_="tags")
        if facts.get("tags")
        else None,
    )


def figure(item: KeyNumber) -> Html:
    note = element("dd", item.note, class_="note") if item.note else None
    return element("div", element("dt", item.label), element("dd", item.value, class_="value"), note)


def _charts(charts: Sequence[Chart]) -> Html:
    if not charts:
        return element("p", "No metrics were written.", class_="empty")
    return concat(*(_chart(index, chart) for index, chart in enumerate(charts)))


def _chart(index: int, chart: Chart) -> Html:
    summary = ". ".join(_summarize(line) for line in chart.lines)
    return figure_frame(chart.title, label=f"{chart.title}. {summary}", number=index, wide=index == 0, summary=summary)


def _summarize(line: Line) -> str:
    finite = line.finite
    if not finite:
        return f"{line.name}: never finite"
    low = min(finite, key=lambda point: point[1])
    first, last, lowest = (format_number(value) for value in (finite[0][1], finite[-1][1], low[1]))
    return f"{line.name}: {first} to {last}, lowest {lowest} at step {low[0]}"


def _sample(sample: str | None) -> Html | None:
    return section("Sample", element("pre", sample, class_="sample")) if sample else Html()


def _config(config: str, facts: Facts) -> Html:
    """All settings, with those that the run's command set marked."""
    rows = [
        element(
            "tr",
            element("th", setting.path, scope="row"),
            element("td", setting.value),
            class_="changed" if setting.changed else None,
        )
        for setting in list_settings(config, facts)
    ]
    if not rows and config.strip():
        return section("Config", element("p", "config.yaml is damaged and cannot be read.", class_="empty"))
    if not rows:
        return Html()
    controls = element(
        "div",
        element("label", element("input", type="checkbox", id="changed-only"), "Changed only", class_="check"),
        element("input", type="search", id="search", placeholder="Search config", aria_label="Search config"),
        class_="controls",
    )
    table = scrolling(element("table", element("tbody", *rows), id="config"))
    nothing = element("p", "Nothing matches.", class_="empty", id="nothing", hidden=True)
    return section("Config", table, nothing, aside=controls)


def _environment(facts: Facts) -> Html:
    git, timings, packages = facts.get("git") or {}, facts.get("timings") or {}, facts.get("packages") or {}
    versions = {name: packages[name] for name in _MAIN_PACKAGES if name in packages}
    entries: dict[str, Any] = {
        "Commit": " ".join(
            filter(None, [git.get("sha"), git.get("branch"), "with uncommitted changes" if git.get("dirty") else ""])
        ),
        "Host": facts.get("host"),
        "Devices": facts.get("devices"),
        "Processors": facts.get("cpu_count"),
        "System": facts.get("platform"),
        "Python": facts.get("python"),
        "Packages": "  ".join(f"{name} {version}" for name, version in versions.items()),
        "Compiler flags": facts.get("xla_flags"),
        "Variables": "  ".join(f"{name}={value}" for name, value in (facts.get("variables") or {}).items()),
        "Timings": "  ".join(f"{name.replace('_', ' ')} {format_duration(value)}" for name, value in timings.items()),
    }
    pairs = [concat(element("dt", label), element("dd", _format(value))) for label, value in entries.items() if value]
    command = copy_box(shlex.join(facts.get("command") or []), "command")
    all_packages = element("p", "  ".join(f"{name} {version}" for name, version in packages.items()))
    fold = element("details", element("summary", f"All {len(packages)} packages"), all_packages) if packages else None
    return section("Environment", command, element("dl", *pairs, class_="pairs"), fold)


def _format(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _sessions(facts: Facts) -> Html:
    names = ("", "Started", "Took", "Steps", "Ended", "Host", "Commit")
    rows = [_session(index, session, facts) for index, session in enumerate(facts["sessions"], start=1)]
    return section("Sessions", scrolling(element("table", head_row(names), element("tbody", *rows), class_="sessions")))


def _session(index: int, session: Facts, facts: Facts) -> Html:
    # The run's status is more recent: it also reflects whether the process of the last session is alive.
    status = str(facts["status"] if session is facts["sessions"][-1] else session["status"])
    steps = [session.get("start_step"), session.get("end_step")]
    git = session.get("git") or {}
    commit = (git.get("sha") or "")[:8] + ("*" if git.get("dirty") else "")
    return element(
        "tr",
        element("td", str(index)),
        element("td", format_time(session["started"])),
        element("td", format_duration(session_seconds(session, facts))),
        element("td", " – ".join(f"{step:,}" for step in steps if step is not None)),
        element("td", element("span", status, class_=f"status {status}"), " ", session.get("reason") or None),
        element("td", str(session["host"])),
        element("td", element("code", commit)),
    )


def _files(folder: Path) -> Html:
    names = [name for name in _FILES if (folder / name).exists()]
    return concat(*(element("a", name, href=name) for name in names))
