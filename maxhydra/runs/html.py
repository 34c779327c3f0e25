"""HTML that is escaped by construction: a string is text, and only `element` makes markup."""

import html
from typing import TypeAlias


class Html(str):
    """Markup that is safe to put into a page as it stands."""

    __slots__ = ()


# Elements without content, and so without an end.
_VOID = ("input",)

Child: TypeAlias = "str | Html | None"


def element(name: str, *children: Child, **attributes: str | bool | None) -> Html:
    """`<name attribute="...">children</name>`: `class_` is class, `aria_label` aria-label, True a bare attribute."""
    written = [_attribute(key, value) for key, value in attributes.items() if value not in (None, False)]
    opening = " ".join([name, *written])
    return Html(f"<{opening}>" if name in _VOID else f"<{opening}>{together(*children)}</{name}>")


def together(*children: Child) -> Html:
    """Children one after the other; plain strings are escaped, None is left out."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children if c is not None))


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{html.escape(str(value))}"'
