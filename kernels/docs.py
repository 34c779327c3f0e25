"""Writes the capability tables of all operations into docs/kernels.md: `python -m maxhydra.kernels.docs`."""

import re
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
from maxhydra.kernels.dispatch import Operation

PATH = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
OPERATIONS: dict[str, Operation[Any, Any]] = {
    operation.name: operation
    for operation in (
        attention.OPERATION,
        grouped_matmul.OPERATION,
        paged_attention.OPERATION,
        gated_delta.OPERATION,
        rms_norm.OPERATION,
        qkv_rope.OPERATION,
        linear_cross_entropy.OPERATION,
    )
}
# The table of an operation, between its two markers.
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with every marked table regenerated."""
    return MARKED.sub(lambda match: f"{match[1]}{OPERATIONS[match[2]].table()}{match[3]}", page)


if __name__ == "__main__":
    PATH.write_text(with_tables(PATH.read_text(encoding="utf-8")), encoding="utf-8")
