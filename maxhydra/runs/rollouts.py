"""Rollouts of a run for people: a query from text fields, completions as text, and the section of the report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record import redact_text
from maxhydra.record.rollouts import EVAL, FOLDER, KINDS, ORDERS, TRAIN, Page, Query, files
from maxhydra.runs.page import Html, element, head_row, scrolling, section

# Prompts and evaluations in the report.
REPORT_PROMPTS, REPORT_STEPS = 6, 4
MAX_LIMIT = 200


def parse_query(fields: Mapping[str, str]) -> Query:
    """A query from fields such as kind=eval, steps=10:20, reward=:0.5, prompt=-3, text=sum, order=best, limit=5."""
    first_step, last_step = _bounds("steps", fields.get("steps", ""), int)
    min_reward, max_reward = _bounds("reward", fields.get("reward", ""), float)
    return Query(
        kind=_choice("kind", fields.get("kind") or TRAIN, KINDS),
        first_step=first_step,
        last_step=last_step,
        min_reward=min_reward,
        max_reward=max_reward,
        prompt_number=_number("prompt", fields["prompt"], int) if fields.get("prompt") else None,
        text=fields.get("text", ""),
        order=_choice("order", fields.get("order") or "newest", ORDERS),
        start=max(0, _number("start", fields.get("start") or "0", int)),
        limit=min(MAX_LIMIT, max(0, _number("limit", fields.get("limit") or "20", int))),
    )


def _choice(name: str, value: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise ConfigError(Problem(name, "is unknown", value=value, accepted=", ".join(accepted)))
    return value


def _number(name: str, text: str, kind: type[Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        accepted = "a whole number" if kind is int else "a number"
        raise ConfigError(Problem(name, "is not accepted", value=text, accepted=accepted)) from None


def _bounds(name: str, text: str, kind: type[Any]) -> tuple[Any, Any]:
    """Inclusive bounds from `low:high`, either of which may be missing, or from a single value."""
    if not text:
        return None, None
    low, colon, high = text.partition(":")
    high = high if colon else low
    return _number(name, low, kind) if low else None, _number(name, high, kind) if high else None


def find_rollouts(run: Path, query: Query) -> Page:
    """Completions of a run, with secrets redacted."""
    from maxhydra.record.rollout_store import search  # noqa: PLC0415 - imports NumPy

    page = search(run / FOLDER, query)
    return Page([{name: _clean(value) for name, value in record.items()} for record in page.records], page.total)


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _clean(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def kinds_of(run: Path) -> list[str]:
    """The kinds of rollouts that a run has."""
    return [kind for kind in KINDS if files(run / FOLDER, kind)]


def _brief(value: Any) -> str:
    """A number of a record, in which NaN is a string."""
    return f"{float(value):.4g}"


def describe(record: Mapping[str, Any]) -> str:
    """One line about a completion: step, prompt, reward by term, length, how it ended."""
    terms = record.get("terms") or {}
    parts = [
        f"step {record['step']}",
        f"prompt {record['prompt_number']}.{record['sample']}",
        f"reward {_brief(record['reward'])}" if terms else "",
        ", ".join(f"{name} {_brief(value)}" for name, value in terms.items()) if len(terms) > 1 else "",
        f"advantage {_brief(record['advantage'])}" if "advantage" in record else "",
        record.get("role") or "",
        f"{record['tokens']} tokens",
        f"{len(record['turns'])} messages" if "turns" in record else "",
        "truncated" if record.get("finish") == "length" else "",
        f"environment {record['failure']}" if "failure" in record else "",
        "not used for training" if record.get("is_used") is False else "",
    ]
    return " · ".join(part for part in parts if part)


def rollouts_section(run: Path) -> Html:
    """The completions of a few held-out prompts, side by side over evaluations; of training without evaluations."""
    kinds = kinds_of(run)
    if not kinds:
        return Html()
    if EVAL not in kinds:
        newest = find_rollouts(run, Query(limit=REPORT_PROMPTS)).records
        rows = [[str(record["prompt"]), *_cell(record)] for record in newest]
        return _table(["Prompt", "Completion", ""], rows) if rows else Html()
    from maxhydra.record.rollout_store import read_index  # noqa: PLC0415 - imports NumPy

    steps = sorted({int(step) for path in files(run / FOLDER, EVAL) for step in read_index(path)["step"]})
    if not steps:
        return Html()
    chosen = sorted({steps[round(index * (len(steps) - 1) / (REPORT_STEPS - 1))] for index in range(REPORT_STEPS)})
    by_step = {
        step: {
            record["prompt_number"]: record
            for record in find_rollouts(run, Query(EVAL, step, step, order="oldest", limit=MAX_LIMIT)).records
            if record["sample"] == 0
        }
        for step in chosen
    }
    rows = []
    for number in list(by_step[chosen[-1]])[:REPORT_PROMPTS]:
        records = [by_step[step].get(number) for step in chosen]
        cells = [" ".join(_cell(record)) if record else "" for record in records]
        rows.append([str(by_step[chosen[-1]][number]["prompt"]), *cells])
    return _table(["Prompt", *(f"Step {step}" for step in chosen)], rows)


def _cell(record: Mapping[str, Any]) -> tuple[str, str]:
    """The completion, and its reward if it has one: samples of other tasks than grpo have none."""
    return str(record["completion"]), f"({_brief(record['reward'])})" if record.get("terms") else ""


def _table(names: list[str], rows: list[list[str]]) -> Html:
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    table = element("table", head_row(names), body, class_="rollouts")
    note = element("p", "Rewards in brackets. All rollouts: maxhydra runs rollouts, or the dashboard.", class_="note")
    return section("Rollouts", scrolling(table), note)
