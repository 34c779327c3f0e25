"""Show training sequences as text with their loss mask, and measure packing efficiency and speed of the pipeline.

No run is recorded and no accelerator is used.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from maxhydra.config import Config
from maxhydra.config.schema.tasks.analysis import Format, InspectDataTask
from maxhydra.data import BatchSpec, Row, RowSpec, Tokenizer, host_loader, load_tokenizer
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = KEEPS_RUN = False

QUANTILES = {"shortest": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "longest": 1.0}

# Style of a run of tokens with and without loss: colour, and the brackets used without colour.
STYLES = {True: ("green", "", ""), False: ("dim", "[", "]")}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document, or a piece of one, in a sequence: its text in runs with or without loss."""

    places: int
    runs: list[tuple[bool, str]]


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A sequence for display; a preference pair has two, each with its name."""

    name: str
    places: int
    pieces: list[Piece]

    @property
    def filled(self) -> int:
        return sum(piece.places for piece in self.pieces)


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, InspectDataTask)
    batches, summary = _measure(config, task.batches)
    rows = [row for batch in batches for row in batch]
    summary |= _lengths(rows)
    tokenizer = load_tokenizer(config.data)
    shown = [list(_sequences(row, tokenizer)) for row in rows[: task.rows]]
    if task.format is Format.json:
        sequences = [[dataclasses.asdict(sequence) for sequence in row] for row in shown]
        print(json.dumps({"summary": summary, "sequences": sequences}, indent=1, ensure_ascii=False))
    else:
        _print(shown, summary, Console(highlight=False, soft_wrap=True))
    metrics = {name: value for name, value in summary.items() if isinstance(value, (int, float))}
    return Outcome("finished", "printed", metrics)


def _measure(config: Config, count: int) -> tuple[list[list[Row]], dict[str, Any]]:
    """Read the first training batches, and measure how long they take."""
    size = max(1, round(config.train.per_device_batch_size * config.train.grad_accum))
    rows = RowSpec.of(config)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    start = time.perf_counter()
    loader = host_loader(config.data, BatchSpec(rows=rows, batch=size, sharding=sharding))
    try:
        batches = [next(loader)]
        first = time.perf_counter()
        batches += itertools.islice(loader, count - 1)
        duration = time.perf_counter() - first if count > 1 else first - start
        metrics = loader.metrics()
    finally:
        loader.close()
    fill = 1 - metrics["data/padding"]
    tokens = max(1, count - 1) * size * config.train.seq_len * fill
    summary = {
        "sequences": count * size,
        "fill": fill,
        "tokens_per_second": tokens / max(duration, 1e-9),
        "seconds_to_first_batch": first - start,
        "epoch": metrics["data/epoch"],
        "skipped_records": int(metrics["data/skipped"]),
        "cut_documents": int(metrics["data/dropped"]),
    }
    return batches, summary


def _lengths(rows: list[Row]) -> dict[str, Any]:
    """Statistics of documents per sequence and of their lengths."""
    counts = [[last - first for first, last in bounds] for row in rows for _, bounds in _document_bounds(row)]
    lengths = np.array([length for row in counts for length in row] or [0])
    return {
        "documents_per_sequence": float(np.mean([len(row) for row in counts])),
        "document_places": {name: float(np.quantile(lengths, share)) for name, share in QUANTILES.items()},
    }


def _document_bounds(row: Row) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Iterate over the token columns of a row by prefix, with the bounds of their documents."""
    for prefix in (name.removesuffix("tokens") for name in row if name.endswith("tokens")):
        if (segments := row.get(f"{prefix}segments")) is not None:
            filled = int(np.count_nonzero(segments))
            starts = np.flatnonzero(np.diff(segments[:filled], prepend=0)).tolist()
        else:
            # Without segments a row is one sequence, followed by padding.
            columns = (row[f"{prefix}{name}"] for name in ("tokens", "targets", "weights") if f"{prefix}{name}" in row)
            nonzero = np.flatnonzero(np.any([column != 0 for column in columns], axis=0))
            filled = int(nonzero[-1]) + 1 if len(nonzero) else 0
            starts = [0] if filled else []
        yield prefix, list(itertools.pairwise([*starts, filled]))


def _sequences(row: Row, tokenizer: Tokenizer) -> Iterator[Sequence]:
    for prefix, bounds in _document_bounds(row):
        tokens = row[f"{prefix}tokens"]
        targets, weights = row.get(f"{prefix}targets"), row.get(f"{prefix}weights")
        pieces = []
        for first, last in bounds:
            if targets is None or weights is None:
                ids, has_loss = tokens[first:last], np.zeros(last - first, bool)
            else:
                # The first token is context only; each following token is a target, and may have loss.
                ids = np.append(tokens[first], targets[first:last])
                has_loss = np.append(False, weights[first:last] > 0)
            pieces.append(Piece(last - first, _runs(ids.tolist(), has_loss.tolist(), tokenizer)))
        yield Sequence(prefix.rstrip("_"), len(tokens), pieces)


def _runs(ids: list[int], has_loss: list[bool], tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Group tokens into runs with or without loss; a special token is shown by its role or its id."""
    named = {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}
    runs: list[tuple[bool, str]] = []
    for (is_target, is_special), group in itertools.groupby(
        zip(ids, has_loss, strict=True), key=lambda pair: (pair[1], pair[0] in tokenizer.special)
    ):
        run_ids = [id for id, _ in group]
        text = "".join(named.get(id, f"<{id}>") for id in run_ids) if is_special else tokenizer.decode(run_ids)
        if runs and runs[-1][0] == is_target:
            text = runs.pop()[1] + text
        runs.append((is_target, text))
    return runs


def _print(shown: list[list[Sequence]], summary: dict[str, Any], console: Console) -> None:
    colour = console.is_terminal and not console.no_color
    if shown:
        legend = Text("text with loss, ").append(Text("text without loss", "dim") if colour else "[text without loss]")
        console.print(legend, style="green" if colour else "")
    for number, sequences in enumerate(shown):
        for sequence in sequences:
            _print_sequence(number, sequence, console, colour=colour)
    lengths = ", ".join(f"{name} {value:,.0f}" for name, value in summary["document_places"].items())
    console.print(
        f"\n{summary['sequences']:,} sequences, {summary['fill']:.2%} filled, "
        f"{summary['documents_per_sequence']:.2f} documents per sequence\n"
        f"tokens per document: {lengths}\n"
        f"{summary['tokens_per_second']:,.0f} tokens per second, the first batch after "
        f"{summary['seconds_to_first_batch']:.2f} s\n"
        f"epoch {summary['epoch']:g}, {summary['skipped_records']:,} records skipped, "
        f"{summary['cut_documents']:,} documents truncated or dropped because of their length"
    )


def _print_sequence(number: int, sequence: Sequence, console: Console, *, colour: bool) -> None:
    name = f"sequence {number}{f' ({sequence.name})' if sequence.name else ''}"
    documents = f"{len(sequence.pieces)} document{'' if len(sequence.pieces) == 1 else 's'}"
    share = sequence.filled / sequence.places
    border = "bold cyan" if colour else ""
    heading = f"\n{name}: {documents}, {sequence.filled:,} of {sequence.places:,} tokens ({share:.1%})"
    console.print(Text(heading, border))
    for index, piece in enumerate(sequence.pieces):
        console.print(Text(f"--- document {index + 1}: {piece.places:,} tokens", border))
        text = Text()
        for has_loss, run in piece.runs:
            style, before, after = STYLES[has_loss]
            text.append(run, style) if colour else text.append(f"{before}{run}{after}")
        console.print(text)
    if padding := sequence.places - sequence.filled:
        console.print(Text(f"--- {padding:,} tokens of padding", border))
