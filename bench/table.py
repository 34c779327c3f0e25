"""Writes the tables of docs/lab/measured.md from JSON lines.

    maxhydra task=bench ... | tee -a docs/performance.jsonl          # or outputs/RUN/bench.jsonl
    python bench/table.py docs/performance.jsonl

The lines are those of task=bench, bench/kernels.py, bench/check_kernels.py, bench/same_loss.py, bench/compare.py and
bench/peers/*.py, in the order of the rows; other lines are ignored. The text is inserted between two markers in
docs/lab/measured.md.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
DOCS = Path(__file__).parent.parent / "docs" / "lab" / "measured.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# Fields of a bench/kernels.py line that describe the case; the others are measurements.
CASE = ("bench", "device", "jax", "kernel", "case", "shape")
# Overrides that do not describe what was measured.
IGNORED = ("data=", "hardware.compilation_cache=", "model=", "task.", "objective=")


def number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def mfu(line: Line) -> str:
    """The MFU, with the dtype of the peak that it is relative to if matmuls are quantized."""
    facts = line.get("settings", {})
    is_quantized = facts.get("quantization") in ("fp8", "int8")
    return share(line["mfu"]) + (f" of {line.get('mfu_dtype', facts['compute'])}" if is_quantized else "")


def settings(line: Line) -> str:
    """The overrides other than the model, or the peer and its sizes."""
    if peer := line.get("peer") or line.get("engine"):
        sizes = ("batch", "seq_len") if kind(line) == "pretrain" else ()
        return ", ".join([peer, *(f"{name} {line[name]}" for name in sizes)])
    overrides = [text for text in line["overrides"] if not text.startswith(IGNORED)]
    return ", ".join(overrides + line.get("xla_flags", [])) or "as given"


def over(name: str) -> Callable[[Line], str]:
    """Relative increase over the baseline format."""
    return lambda line: "" if line["format"] == line["against"] else f"{100 * line[name]:+.2f} %"


def model(line: Line) -> str:
    return str(line.get("model", ""))


def format_facts(facts: dict[str, Any]) -> str:
    """Measurements by name, nested ones in parentheses."""
    values = {name: f"({format_facts(fact)})" if isinstance(fact, dict) else fact for name, fact in facts.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def kernel_measurements(line: Line) -> str:
    """The measurements of one case of bench/kernels.py."""
    return format_facts({name: value for name, value in line.items() if name not in CASE})


Column = Callable[[Line], str]
TABLES: dict[str, tuple[str, dict[str, Column]]] = {
    "pretrain": (
        "Training",
        {
            "model": model,
            "settings": settings,
            "tokens/s": lambda line: number(line["tokens_per_second"]),
            "step ms": lambda line: number(line["step_ms"], 1),
            "TFLOP/s": lambda line: number(line["tflops_per_device"], 0 if line["tflops_per_device"] >= 10 else 3),
            "MFU": mfu,
            "peak GiB": lambda line: number(line["peak_memory_gib"], 1),
            "compile s": lambda line: number(line["compile_s"]),
        },
    ),
    "decode": (
        "Decoding",
        {
            "model": model,
            "settings": settings,
            "batch": lambda line: str(line["batch"]),
            "prompt, new": lambda line: f"{line['prompt']}, {line['new']}",
            "tokens/s": lambda line: number(line["tokens_per_second"]),
            "after the first": lambda line: number(line["tokens_per_second_after_first"]),
            "all running": lambda line: number(line.get("tokens_per_second_steady")),
            "time to the last first token": lambda line: f"{1e3 * first_token(line):.0f} ms",
        },
    ),
    "same_loss": (
        "Losses with quantization, over seeds",
        {
            "format": lambda line: line["format"],
            "evaluations": lambda line: ", ".join(map(str, line["eval_runs"])),
            "mean": lambda line: f"{list(line['eval_loss'].values())[-1]}",
            "over": over("eval_over"),
            "last fifth of training, over": over("loss_over"),
            "at its worst step": over("worst_over"),
        },
    ),
    "kernels": (
        "Kernels",
        {
            "kernel": lambda line: str(line["operation"]),
            "backend": lambda line: str(line["backend"]),
            "shape": lambda line: " x ".join(map(str, next(iter(line["shapes"].values())))),
            "forward ms": lambda line: number(line["forward_ms"], 3),
            "with gradients ms": lambda line: number(line["both_ms"], 3),
            "error": lambda line: f"{line['error']:.2g}",
        },
    ),
    "kernel_comparison": (
        "Kernels compared with XLA and cuDNN",
        {
            "kernel": lambda line: ", ".join(str(line[name]) for name in ("kernel", "case") if name in line),
            "shape": lambda line: " x ".join(map(str, line["shape"])),
            "measured": kernel_measurements,
        },
    ),
    "check_kernels": (
        "Kernels against the float32 reference, largest error over all cases",
        {
            "kernel": lambda line: line["kernel"],
            "backend": lambda line: line["backend"],
            "format": lambda line: line["dtype"],
            "cases": lambda line: str(line["cases"]),
            "values": lambda line: f"{line['values']:.2g}",
            "gradients": lambda line: "none" if line["gradients"] is None else f"{line['gradients']:.2g}",
            "limit": lambda line: f"{line['limit']:.2g}",
        },
    ),
    "compare": (
        "Against peers",
        {
            "model": model,
            "what": lambda line: f"{line['what']}, batch {line['batch']}" if "batch" in line else line["what"],
            "peer": lambda line: line["against"],
            "ours, tokens/s": lambda line: number(line["ours"]),
            "theirs": lambda line: number(line["peer"]),
            "ratio": lambda line: f"{line['ratio']:.2f}",
        },
    ),
}


def first_token(line: Line) -> float:
    return line["first_token_s"] if "first_token_s" in line else line["seconds_to_first_token"]


def kind(line: Line) -> str:
    """The table of a line; decode lines of a peer have no `bench` field, those of bench/kernels.py no `operation`."""
    name = str(line.get("bench", "decode"))
    return "kernel_comparison" if name == "kernels" and "operation" not in line else name


def machines_and_versions(lines: Iterable[Line]) -> str:
    """Devices, versions and dates of the lines that have them."""
    complete = [line for line in lines if "device" in line and "jax" in line]
    machines = sorted({f"{line.get('devices', 1)} x {line['device']}" for line in complete})
    versions = sorted(
        {", ".join(f"{name} {line[name]}" for name in ("jax", "flax") if name in line) for line in complete}
    )
    return "; ".join([*machines, *versions, *sorted({line["date"] for line in complete if "date" in line})])


def table(lines: list[Line]) -> str:
    """The text between the markers: a table for each kind of line."""
    parts = []
    for name, (title, columns) in TABLES.items():
        selected = [line for line in lines if kind(line) == name]
        if not selected:
            continue
        rows = [
            list(columns),
            ["---"] * len(columns),
            *([cell(line) for cell in columns.values()] for line in selected),
        ]
        about = f" ({where})" if (where := machines_and_versions(selected)) else ""
        parts.append(f"### {title}{about}\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


def read_lines(paths: Iterable[Path]) -> list[Line]:
    texts = [text for path in paths for text in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(text) for text in texts if text.startswith("{")]


def placed(document: str, text: str) -> str:
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    DOCS.write_text(placed(DOCS.read_text(), table(read_lines(map(Path, sys.argv[1:])))))
