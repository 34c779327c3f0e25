"""A page that needs nothing but itself: style, script and data inside it, and a policy that lets nothing else in."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from maxhydra.record.atomic_io import plain
from maxhydra.runs.html import Html, element, together


def page(title: str, body: Html, *, name: str, data: Any) -> str:
    """The whole document; `name` is that of its own style and script, which come after the shared ones."""
    return _document(title, body, style=joined("base.css", f"{name}.css"), scripts=[f"{name}.js"], data=data)


def live_page(title: str, body: Html, *, bar: Html, data: Any) -> str:
    """The dashboard, whose script may talk to the server that it came from."""
    style, scripts = joined("base.css", "dashboard.css"), ["dashboard_table.js", "dashboard.js"]
    return _document(title, body, style=style, scripts=scripts, data=data, bar=bar, allowed="; connect-src 'self'")


def _document(
    title: str, body: Html, *, style: str, scripts: Sequence[str], data: Any, bar: Html | None = None, allowed: str = ""
) -> str:
    script = joined("page.js", "curves.js", *scripts)
    # Hashes instead of 'unsafe-inline': no other script or style runs, even if one slipped into the page.
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    return Template(part("page.html")).substitute(
        policy=policy + allowed,
        style=style,
        script=script,
        title=together(title),
        bar=bar or Html(),
        body=body,
        # `<` as an escape: nothing in the data can end the element that holds it.
        data=Html(json.dumps(plain(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")),
    )


def part(name: str) -> str:
    return resources.files("maxhydra.runs").joinpath(name).read_text(encoding="utf-8")


def joined(*names: str) -> str:
    return "".join(part(name) for name in names)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def curve_controls(*more: Html) -> Html:
    """Scale and smoothing of the curves under it."""
    log = element("label", element("input", type="checkbox", id="log"), "Log scale", class_="check")
    slider = element("input", type="range", id="smoothing", min="0", max="0.98", step="0.02", value="0")
    return element(
        "div",
        *more,
        log,
        element("label", "Smoothing", slider, element("output", "0", id="smoothed"), class_="slide"),
        class_="controls",
    )


def figure_frame(title: str, *, label: str, number: int | None = None, wide: bool = False, words: str = "") -> Html:
    """An empty frame, which the script fills; `label` and `words` say what the curves show to those who do not see."""
    return element(
        "figure",
        element("figcaption", element("h3", title), element("output", class_="readout", aria_live="off")),
        element("div", class_="plot", tabindex="0", role="img", aria_label=label),
        element("noscript", element("p", words)) if words else None,
        class_="chart wide" if wide else "chart",
        data_chart=None if number is None else str(number),
    )


def section(title: str, *content: Html | None, aside: Html | None = None) -> Html:
    return element("section", element("div", element("h2", title), aside, class_="head"), *content)


def scrolling(table: Html) -> Html:
    return element("div", table, class_="scroll", tabindex="0")


def head_row(names: Sequence[str]) -> Html:
    return element("thead", element("tr", *(element("th", name, scope="col") for name in names)))


def copied(text: str, identity: str) -> Html:
    """A command in a box with a button that copies it."""
    return element(
        "div",
        element("code", text, id=identity),
        element("button", "Copy", type="button", data_copy=identity),
        class_="command",
    )
