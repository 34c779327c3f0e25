"""HTML that is escaped by construction: plain strings are text, and only `element` creates markup."""

import html
from typing import TypeAlias


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
