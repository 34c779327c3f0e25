"""Self-contained HTML pages: style, script and data are inline, and a CSP allows nothing else.

HTML is escaped by construction: plain strings are text, and only `element` creates markup.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any, TypeAlias

from maxhydra.record.atomic_io import to_plain


class Html(str):
    """Markup that is safe to insert into a page without escaping."""

    __slots__ = ()


# Elements without content or end tag.
_VOID = ("input",)

Child: TypeAlias = "str | Html | None"


def element(name: str, *children: Child, **attributes: str | bool | None) -> Html:
    """`<name attribute="...">children</name>`: `class_` is class, `aria_label` aria-label, True a bare attribute."""
    rendered = [_attribute(key, value) for key, value in attributes.items() if value not in (None, False)]
    opening = " ".join([name, *rendered])
    return Html(f"<{opening}>" if name in _VOID else f"<{opening}>{concat(*children)}</{name}>")


def concat(*children: Child) -> Html:
    """Concatenate children; plain strings are escaped, None is omitted."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children if c is not None))


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{html.escape(str(value))}"'


def page(title: str, body: Html, *, name: str, data: Any) -> str:
    """Complete document; `name` selects its style and script, which follow the shared ones."""
    style = read_assets("base.css", "plots.css", f"{name}.css")
    script = read_assets("page.js", "series.js", "curves.js", "parallel.js", f"{name}.js")
    # Hashes instead of 'unsafe-inline': no other script or style runs, even if one were injected.
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    return Template(read_asset("page.html")).substitute(
        policy=policy,
        style=style,
        script=script,
        title=concat(title),
        body=body,
        # `<` is escaped, so that nothing in the data can close the script element.
        data=Html(json.dumps(to_plain(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")),
    )


def read_asset(name: str) -> str:
    """Contents of a file of runs/web/."""
    return resources.files("maxhydra.runs").joinpath("web", name).read_text(encoding="utf-8")


def read_assets(*names: str) -> str:
    return "".join(read_asset(name) for name in names)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def curve_controls(*more: Html) -> Html:
    """Controls for scale and smoothing of the curves below."""
    log = element("label", element("input", type="checkbox", id="log"), "Log scale", class_="check")
    slider = element("input", type="range", id="smoothing", min="0", max="0.98", step="0.02", value="0")
    return element(
        "div",
        *more,
        log,
        element("label", "Smoothing", slider, element("output", "0", id="smoothed"), class_="slide"),
        class_="controls",
    )


def figure_frame(title: str, *, label: str, number: int | None = None, wide: bool = False, summary: str = "") -> Html:
    """Empty figure that the script fills; `label` and `summary` describe it to screen readers and without scripts."""
    return element(
        "figure",
        element("figcaption", element("h3", title), element("output", class_="readout", aria_live="off")),
        element("div", class_="plot", tabindex="0", role="img", aria_label=label),
        element("noscript", element("p", summary)) if summary else None,
        class_="chart wide" if wide else "chart",
        data_chart=None if number is None else str(number),
    )


def section(title: str, *content: Html | None, aside: Html | None = None) -> Html:
    return element("section", element("div", element("h2", title), aside, class_="head"), *content)


def scrolling(table: Html) -> Html:
    return element("div", table, class_="scroll", tabindex="0")


def head_row(names: Sequence[str]) -> Html:
    return element("thead", element("tr", *(element("th", name, scope="col") for name in names)))


def copy_box(text: str, identity: str) -> Html:
    """A command with a button that copies it."""
    return element(
        "div",
        element("code", text, id=identity),
        element("button", "Copy", type="button", data_copy=identity),
        class_="command",
    )
