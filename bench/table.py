"""Writes the tables of docs/lab/measured.md and docs/performance.md from JSON lines.

    maxhydra task=bench ... | tee -a docs/performance.jsonl          # or outputs/RUN/bench.jsonl
    cat one_gpu.jsonl >> docs/performance.jsonl                      # the lines of bench/one_gpu.sh
    python bench/table.py docs/performance.jsonl

The lines are those of task=bench and of the scripts in bench/, in the order of the rows; other lines are ignored. The
text is inserted between two markers in each page: all lines in docs/lab/measured.md, and the newest line of each case
that was measured on a GPU in docs/performance.md.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records import (
    IRRELEVANT,
    Columns,
    Line,
    date,
    drafts,
    first_token,
    kind,
    markdown,
    mfu,
    number,
    peer,
    placed,
    read_lines,
    requests_lost,
    seconds,
    share,
)
from results import results

DOCS = Path(__file__).parent.parent / "docs"
# Fields of a bench/kernels.py line that describe the case; the others are measurements.
CASE = ("bench", "device", "jax", "kernel", "case", "shape")


def settings(line: Line) -> str:
    """The overrides other than the model, or the peer and its sizes."""
    overrides = [text for text in line.get("overrides", ()) if not text.startswith((*IRRELEVANT, "model="))]
    if name := peer(line):
        sizes = [f"{size} {line[size]}" for size in ("batch", "seq_len")] if kind(line) == "pretrain" else []
        attention = [line["attention"]] if line.get("attention", "sdpa") != "sdpa" else []
        checkpointing = ["checkpointing"] if line.get("checkpointing") else []
        return ", ".join([name, *overrides, *sizes, *attention, *checkpointing])
    return ", ".join(overrides + line.get("xla_flags", [])) or "as given"


def over(name: str) -> Callable[[Line], str]:
    """Relative increase over the baseline format."""
    return lambda line: "" if line["format"] == line["against"] else f"{100 * line[name]:+.2f} %"


def model(line: Line) -> str:
    return str(line.get("model", ""))


def tflops(line: Line) -> str:
    value = line.get("tflops_per_device")
    return number(value, 0 if value is None or value >= 10 else 3)


def memory(line: Line) -> str:
    """Host memory of the server before and after the load."""
    names = ("memory_start_mib", "memory_end_mib")
    return " to ".join(f"{line[name]:.0f}" for name in names if name in line)


def format_facts(facts: dict[str, Any]) -> str:
    """Measurements by name, nested ones in parentheses."""
    values = {name: f"({format_facts(fact)})" if isinstance(fact, dict) else fact for name, fact in facts.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def kernel_measurements(line: Line) -> str:
    """The measurements of one case of bench/kernels.py."""
    return format_facts({name: value for name, value in line.items() if name not in CASE})


TABLES: dict[str, tuple[str, Columns]] = {
    "pretrain": (
        "Training",
        {
            "model": model,
            "settings": settings,
            "tokens/s": lambda line: number(line["tokens_per_second"]),
            "step ms": lambda line: number(line.get("step_ms"), 1),
            "TFLOP/s": tflops,
            "MFU": mfu,
            "peak GiB": lambda line: number(line["peak_memory_gib"], 1),
            "compile s": lambda line: number(line.get("compile_s")),
            "date": date,
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
            "after the first": lambda line: number(line.get("tokens_per_second_after_first")),
            "all running": lambda line: number(line.get("tokens_per_second_steady")),
            "time to the last first token": first_token,
            "date": date,
        },
    ),
    "serve_start": (
        "Start of the server",
        {
            "model": model,
            "compilation cache": lambda line: {True: "filled", False: "empty"}.get(line.get("is_cached"), ""),
            "programs": lambda line: number(line["programs_compiled"]),
            "listening after": lambda line: seconds(line.get("start_s"), 1),
            "first response after": lambda line: seconds(line["first_response_s"], 1),
            "date": date,
        },
    ),
    "serve_load": (
        "Server under load",
        {
            "model": model,
            "settings": settings,
            "clients, new": lambda line: f"{line['clients']}, {line['new']}",
            "tokens/s": lambda line: number(line["tokens_per_second"]),
            "p50, p95, p99": lambda line: ", ".join(seconds(line[f"p{name}_s"]) for name in (50, 95, 99)),
            "first token p50": lambda line: seconds(line["first_token_p50_s"]),
            "first token p95": lambda line: seconds(line["first_token_p95_s"]),
            "lost": requests_lost,
            "compiled under load": lambda line: number(line["programs_compiled_under_load"]),
            "host memory MiB": memory,
            "date": date,
        },
    ),
    "rollouts": (
        "Rollouts",
        {
            "model": model,
            "settings": settings,
            "completions": lambda line: str(line["completions"]),
            "prompt, new": lambda line: f"{line['prompt']}, {line['new']}",
            "tokens/s": lambda line: number(line["tokens_per_second"]),
            "each round": lambda line: ", ".join(number(speed) for speed in line["rounds_tokens_per_second"]),
            "identical": lambda line: str(line["is_identical"]),
            "date": date,
        },
    ),
    "speculation": (
        "Speculative decoding",
        {
            "model": model,
            "settings": settings,
            "drafts": drafts,
            "text": lambda line: line["text"],
            "batch": lambda line: str(line["batch"]),
            "prompt, new": lambda line: f"{line['prompt']}, {line['new']}",
            "tokens/s": lambda line: number(line.get("speculative")),
            "without": lambda line: number(line.get("plain")),
            "ratio": lambda line: f"{line['ratio']:.2f}",
            "accepted per token": lambda line: number(line.get("tokens_accepted_per_token"), 2),
            "date": date,
        },
    ),
    "structured_output": (
        "Structured output",
        {
            "model": model,
            "settings": settings,
            "batch": lambda line: str(line["batch"]),
            "steps per call": lambda line: str(line["steps_per_call"]),
            "rejected": lambda line: share(line["rejected_per_token"]),
            "steps per token": lambda line: number(line["steps_per_token"], 2),
            "ms per token": lambda line: number(line["ms"], 2),
            "without a grammar": lambda line: number(line["free_ms"], 2),
            "date": date,
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
            "model": lambda line: model(line) + (f", {line['layers']} layers" if "layers" in line else ""),
            "what": lambda line: f"{line['what']}, batch {line['batch']}" if "batch" in line else line["what"],
            "peer": lambda line: line["against"],
            "ours, tokens/s": lambda line: number(line["ours"]),
            "theirs": lambda line: number(line["peer"]),
            "ratio": lambda line: f"{line['ratio']:.2f}",
        },
    ),
}


def machines_and_versions(lines: list[Line]) -> str:
    """Devices, versions and dates of the lines that have them."""
    complete = [line for line in lines if "device" in line and ("jax" in line or kind(line).startswith("serve"))]
    machines = sorted({f"{line.get('devices', 1)} x {line['device']}" for line in complete})
    names = ("jax", "flax")
    versions = sorted({", ".join(f"{name} {line[name]}" for name in names if name in line) for line in complete})
    dates = sorted({line["date"] for line in complete if "date" in line})
    return "; ".join(filter(None, [*machines, *versions, *dates]))


def tables(lines: list[Line]) -> str:
    """A table for each kind of line."""
    parts = []
    for name, (title, columns) in TABLES.items():
        selected = [line for line in lines if kind(line) == name]
        if selected:
            about = f" ({where})" if (where := machines_and_versions(selected)) else ""
            parts.append(f"### {title}{about}\n{markdown(columns, selected)}")
    return "\n\n".join(parts) + "\n"


# Page -> the name of its markers, and what makes the text between them.
PAGES: dict[Path, tuple[str, Callable[[list[Line]], str]]] = {
    DOCS / "lab" / "measured.md": ("measured", tables),
    DOCS / "performance.md": ("results", results),
}


def main(paths: list[str]) -> None:
    lines = read_lines(map(Path, paths))
    for page, (name, make) in PAGES.items():
        page.write_text(placed(page.read_text(encoding="utf-8"), make(lines), name=name), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
