"""Reads the JSON lines of the scripts in bench/, and formats their values for tables in Markdown."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Columns = Mapping[str, Callable[[Line], str]]
LAYERS = "model.num_layers="
# Overrides that change the work; others, except sizes, are tuning.
OTHER_WORK = ("quantization", "adapter=", "optimizer=", "model.dtypes.weights=")
# Overrides of data, measurement and storage.
IRRELEVANT = ("data=", "hardware.compilation_cache=", "task.", "objective=", "run.")
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"


def read_lines(paths: Iterable[Path]) -> list[Line]:
    texts = [text for path in paths for text in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(text) for text in texts if text.startswith("{")]


def kind(line: Line) -> str:
    """The table of a line; decode lines of a peer have no `bench` field, those of bench/kernels.py no `operation`."""
    name = str(line.get("bench", "decode"))
    return "kernel_comparison" if name == "kernels" and "operation" not in line else name


def peer(line: Line) -> str | None:
    """The program that was measured, if it is not maxhydra."""
    return line.get("peer") or line.get("engine")


def layers(line: Line) -> str | None:
    """The number of layers that the model is cut to."""
    return next((text.removeprefix(LAYERS) for text in line.get("overrides", ()) if text.startswith(LAYERS)), None)


def first_token(line: Line) -> str:
    """The time to the first token, of the last sequence."""
    value = line.get("first_token_s", line.get("seconds_to_first_token"))
    return "" if value is None else f"{1e3 * value:.0f} ms"


def date(line: Line) -> str:
    return str(line.get("date", ""))


def drafts(line: Line) -> str:
    """What drafts the tokens that speculative decoding verifies."""
    names = {"ngram": "n-grams", "mtp": "MTP layer", "model": f"`{line.get('draft')}`"}
    return names[line.get("method", "ngram")]


def requests_lost(line: Line) -> str:
    return f"{line['lost']} of {number(line['requests'])}" if "requests" in line else str(line["lost"])


def number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f} s"


def mfu(line: Line) -> str:
    """The MFU, with the dtype of the peak that it is relative to if matmuls are quantized."""
    facts = line.get("settings", {})
    is_quantized = facts.get("quantization") in ("fp8", "int8")
    return share(line["mfu"]) + (f" of {line.get('mfu_dtype', facts['compute'])}" if is_quantized else "")


def markdown(columns: Columns, lines: Iterable[Line]) -> str:
    """A table with one row per line."""
    cells = [list(columns), ["---"] * len(columns), *([cell(line) for cell in columns.values()] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def placed(document: str, text: str, *, name: str) -> str:
    """The document with the text between the markers of this name."""
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = document.split(begin)
    return f"{before}{begin}\n{text}{end}{rest.split(end)[1]}"
