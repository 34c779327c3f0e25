"""The capability tables as docs/kernels.md shows them: `python -m maxhydra.kernels.docs` writes them there."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxhydra.kernels import (
    attention,
    gated_delta,
    grouped_matmul,
    linear_cross_entropy,
    paged_attention,
    qkv_rope,
    rms_norm,
)

PATH = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
OPERATIONS: dict[str, Mapping[str, Any]] = {
    "attention": attention.BACKENDS,
    "grouped_matmul": grouped_matmul.BACKENDS,
    "paged_attention": paged_attention.BACKENDS,
    "delta": gated_delta.BACKENDS,
    "rms_norm": rms_norm.BACKENDS,
    "rotated_heads": qkv_rope.BACKENDS,
    "linear_cross_entropy": linear_cross_entropy.BACKENDS,
}
# What stands between the marks of an operation.
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table as the backends are now."""
    return MARKED.sub(lambda found: f"{found[1]}{table(OPERATIONS[found[2]])}{found[3]}", page)


def table(backends: Mapping[str, Any]) -> str:
    """A column for each backend, fastest first, a row for what any of them is limited by."""
    rows = [("", *(f"`{name}`" for name in backends)), ("---",) * (len(backends) + 1)]
    for field in dataclasses.fields(next(iter(backends.values()))):
        if field.name not in ("run", "cut", "fill"):
            values = (_shown(getattr(backend, field.name)) for backend in backends.values())
            rows.append((field.name.replace("_", " "), *values))
    rows = [row for row in rows if set(row[1:]) != {"any"}]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _shown(value: Any) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    PATH.write_text(with_tables(PATH.read_text(encoding="utf-8")), encoding="utf-8")
