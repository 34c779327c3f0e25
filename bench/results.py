"""The tables of docs/performance.md: the newest measurement of each case on a GPU, and of a peer.

`python bench/table.py docs/performance.jsonl` writes them between the markers of the page.
"""

from collections.abc import Callable, Hashable, Iterable

from records import (
    IRRELEVANT,
    OTHER_WORK,
    Columns,
    Line,
    date,
    drafts,
    first_token,
    kind,
    layers,
    markdown,
    mfu,
    number,
    peer,
    requests_lost,
    seconds,
    share,
)

SIZES = ("model=", "model.num_layers=", "train.seq_len=", "train.per_device_batch_size=")
# Settings of a training step that are part of its case.
ROWS = ("per_device_batch_size", "seq_len")


def case(line: Line) -> str:
    """The model, its layers if it is cut, and the overrides that change the work."""
    parts = [f"`{line['model']}`", *([f"{layers(line)} layers"] if layers(line) else [])]
    return ", ".join([*parts, *(f"`{text}`" for text in line["overrides"] if text.startswith(OTHER_WORK))])


def settings(line: Line) -> str:
    """Whether the other settings are the defaults."""
    is_tuned = any(not text.startswith((*OTHER_WORK, *SIZES, *IRRELEVANT)) for text in line["overrides"])
    return "tuned" if is_tuned or line.get("xla_flags") else "default"


def newest(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> list[Line]:
    """The last line of each key, in the order of the first ones."""
    found: dict[Hashable, Line] = {}
    for line in lines:
        found[key(line)] = line
    return list(found.values())


def is_plain(line: Line) -> bool:
    """Whether a peer did the same work: no other format, optimizer or adapter."""
    return not any(text.startswith(OTHER_WORK) for text in line["overrides"])


def training(lines: list[Line]) -> str:
    steps = [line for line in lines if kind(line) == "pretrain"]
    own = newest(
        (line for line in steps if not peer(line)),
        lambda line: (case(line), settings(line), *(line["settings"][name] for name in ROWS)),
    )
    peers = newest(
        (line for line in steps if peer(line)), lambda line: (line["model"], layers(line), line["batch"], peer(line))
    )

    def of_peer(line: Line) -> str:
        same = [other for other in peers if (other["model"], layers(other)) == (line["model"], layers(line))]
        if not same or not is_plain(line):
            return ""
        best = max(same, key=lambda other: other["tokens_per_second"])
        return f"{number(best['tokens_per_second'])}, batch {best['batch']}"

    columns: Columns = {
        "training": case,
        "batch": lambda line: f"{line['settings']['per_device_batch_size']:g}",
        "sequence": lambda line: number(line["settings"]["seq_len"]),
        "settings": settings,
        "remat": lambda line: line["settings"]["remat"],
        "tok/s": lambda line: number(line["tokens_per_second"]),
        "MFU": mfu,
        "peak GiB": lambda line: number(line["peak_memory_gib"], 1),
        "transformers": of_peer,
        "date": date,
    }
    # Default settings first.
    return markdown(columns, sorted(own, key=settings)) if own else ""


def decoding(lines: list[Line]) -> str:
    runs = [line for line in lines if kind(line) == "decode"]

    def load(line: Line) -> tuple[Hashable, ...]:
        return line["model"], layers(line), line["batch"], line["prompt"], line["new"]

    own = newest((line for line in runs if not peer(line)), lambda line: (case(line), *load(line)))
    peers = {load(line): line for line in runs if peer(line)}
    columns: Columns = {
        "decoding": case,
        "batch": lambda line: str(line["batch"]),
        "prompt, new": lambda line: f"{line['prompt']}, {line['new']}",
        "tok/s": lambda line: number(line["tokens_per_second"]),
        "time to first token": first_token,
        "transformers": lambda line: (
            number(peers[load(line)]["tokens_per_second"]) if is_plain(line) and load(line) in peers else ""
        ),
        "date": date,
    }
    return markdown(columns, own) if own else ""


def server(lines: list[Line]) -> str:
    loads = newest(
        (line for line in lines if kind(line) == "serve_load"), lambda line: (line["model"], line["clients"])
    )
    columns: Columns = {
        "HTTP server": lambda line: f"`{line['model']}`, {line['new']} tokens a request",
        "clients": lambda line: number(line["clients"]),
        "tok/s": lambda line: number(line["tokens_per_second"]),
        "p50": lambda line: seconds(line["p50_s"]),
        "p95": lambda line: seconds(line["p95_s"]),
        "p99": lambda line: seconds(line["p99_s"]),
        "first token p50": lambda line: seconds(line["first_token_p50_s"]),
        "lost requests": requests_lost,
        "date": date,
    }
    return markdown(columns, loads) if loads else ""


def start(lines: list[Line]) -> str:
    starts = [line for line in lines if kind(line) == "serve_start" and "is_cached" in line]
    columns: Columns = {
        "start of the server": lambda line: f"`{line['model']}`",
        "compilation cache": lambda line: "filled" if line["is_cached"] else "empty",
        "listening after": lambda line: seconds(line.get("start_s"), 1),
        "first response after": lambda line: seconds(line["first_response_s"], 1),
        "date": date,
    }
    found = newest(starts, lambda line: (line["model"], line["is_cached"]))
    return markdown(columns, found) if found else ""


def rollouts(lines: list[Line]) -> str:
    found = newest((line for line in lines if kind(line) == "rollouts"), lambda line: (case(line), line["completions"]))
    columns: Columns = {
        "rollouts of GRPO": case,
        "completions": lambda line: str(line["completions"]),
        "prompt, new": lambda line: f"{line['prompt']}, {line['new']}",
        "tok/s": lambda line: number(line["tokens_per_second"]),
        "identical when repeated": lambda line: "yes" if line["is_identical"] else "no",
        "date": date,
    }
    return markdown(columns, found) if found else ""


def speculation(lines: list[Line]) -> str:
    found = newest(
        (line for line in lines if kind(line) == "speculation"),
        lambda line: (case(line), drafts(line), line["text"], line["batch"], line["prompt"]),
    )
    columns: Columns = {
        "speculative decoding": case,
        "drafts": drafts,
        "text": lambda line: line["text"],
        "batch": lambda line: str(line["batch"]),
        "tok/s": lambda line: number(line.get("speculative")),
        "without": lambda line: number(line.get("plain")),
        "ratio": lambda line: f"{line['ratio']:.2f}",
        "date": date,
    }
    return markdown(columns, found) if found else ""


def structured_output(lines: list[Line]) -> str:
    found = newest(
        (line for line in lines if kind(line) == "structured_output" and line.get("steps_per_call") == "auto"),
        lambda line: (case(line), line["batch"], line.get("error_rate"), line.get("temperature")),
    )
    columns: Columns = {
        "structured output": case,
        "batch": lambda line: str(line["batch"]),
        "rejected tokens": lambda line: share(line["rejected_per_token"]),
        "ms per token": lambda line: number(line["ms"], 2),
        "without a grammar": lambda line: number(line["free_ms"], 2),
        "cost": lambda line: share(line["cost_percent"] / 100),
        "date": date,
    }
    return markdown(columns, found) if found else ""


def results(lines: list[Line]) -> str:
    """All tables of which there are measurements on a GPU."""
    on_gpu = [line for line in lines if line.get("device") not in (None, "cpu")]
    parts = [make(on_gpu) for make in (training, decoding, server, start, rollouts, speculation, structured_output)]
    return "\n\n".join(part for part in parts if part) + "\n"
