"""What a model would be trained on: sequences as text with what is learned of them; how well and fast they are made.

No run is kept and no accelerator used.
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
from maxhydra.config.schema.tasks.inspect import Format
from maxhydra.config.schema.tasks.inspect_data import InspectDataTask
from maxhydra.data import BatchSpec, Row, RowSpec, Tokenizer, host_loader, load_tokenizer
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = KEEPS_RUN = False

QUANTILES = {"shortest": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "longest": 1.0}

# How a run of tokens is shown: in colour, and around it where there is none.
STYLES = {True: ("green", "", ""), False: ("dim", "[", "]")}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document, or a piece of one, in a sequence: its text in runs that are learned or only read."""

    places: int
    runs: list[tuple[bool, str]]


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A sequence as a reader sees it; a pair has two, each with its name."""

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
    """The first batches of training, and how long they took."""
    size = max(1, round(config.train.per_device_batch_size * config.train.grad_accum))
    rows = RowSpec(seq_len=config.train.seq_len, vocab_size=config.model.vocab_size, seed=config.run.seed)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    began = time.perf_counter()
    loader = host_loader(config.data, BatchSpec(rows=rows, batch=size, sharding=sharding))
    try:
        batches = [next(loader)]
        first = time.perf_counter()
        batches += itertools.islice(loader, count - 1)
        took = time.perf_counter() - first if count > 1 else first - began
        counted = loader.metrics()
    finally:
        loader.close()
    fill = 1 - counted["data/padding"]
    measured = max(1, count - 1) * size * config.train.seq_len * fill
    summary = {
        "sequences": count * size,
        "fill": fill,
        "tokens_per_second": measured / max(took, 1e-9),
        "seconds_to_first_batch": first - began,
        "epoch": counted["data/epoch"],
        "skipped_records": int(counted["data/skipped"]),
        "cut_documents": int(counted["data/dropped"]),
    }
    return batches, summary


def _lengths(rows: list[Row]) -> dict[str, Any]:
    """Documents in a sequence, and how long they are there."""
    counts = [[last - first for first, last in bounds] for row in rows for _, bounds in _parts(row)]
    lengths = np.array([length for row in counts for length in row] or [0])
    return {
        "documents_per_sequence": float(np.mean([len(row) for row in counts])),
        "document_places": {name: float(np.quantile(lengths, share)) for name, share in QUANTILES.items()},
    }


def _parts(row: Row) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Each run of tokens of a row by its prefix, with where its documents begin and end."""
    for prefix in (name.removesuffix("tokens") for name in row if name.endswith("tokens")):
        if (segments := row.get(f"{prefix}segments")) is not None:
            filled = int(np.count_nonzero(segments))
            begins = np.flatnonzero(np.diff(segments[:filled], prepend=0)).tolist()
        else:
            # Without segments a row is one sequence, and all behind its last token is padding.
            beside = (row[f"{prefix}{name}"] for name in ("tokens", "targets", "weights") if f"{prefix}{name}" in row)
            seen = np.flatnonzero(np.any([column != 0 for column in beside], axis=0))
            filled = int(seen[-1]) + 1 if len(seen) else 0
            begins = [0] if filled else []
        yield prefix, list(itertools.pairwise([*begins, filled]))


def _sequences(row: Row, tokenizer: Tokenizer) -> Iterator[Sequence]:
    for prefix, bounds in _parts(row):
        tokens = row[f"{prefix}tokens"]
        targets, weights = row.get(f"{prefix}targets"), row.get(f"{prefix}weights")
        pieces = []
        for first, last in bounds:
            if targets is None or weights is None:
                ids, learned = tokens[first:last], np.zeros(last - first, bool)
            else:
                # The first token is read only; each that follows is a target, and may be learned.
                ids = np.append(tokens[first], targets[first:last])
                learned = np.append(False, weights[first:last] > 0)
            pieces.append(Piece(last - first, _runs(ids.tolist(), learned.tolist(), tokenizer)))
        yield Sequence(prefix.rstrip("_"), len(tokens), pieces)


def _runs(ids: list[int], learned: list[bool], tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Text of neighbours that are alike; a token that has no text is shown by its role or its number."""
    named = {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}
    runs: list[tuple[bool, str]] = []
    for (is_learned, is_special), some in itertools.groupby(
        zip(ids, learned, strict=True), key=lambda pair: (pair[1], pair[0] in tokenizer.special)
    ):
        found = [id for id, _ in some]
        text = "".join(named.get(id, f"<{id}>") for id in found) if is_special else tokenizer.decode(found)
        if runs and runs[-1][0] == is_learned:
            text = runs.pop()[1] + text
        runs.append((is_learned, text))
    return runs


def _print(shown: list[list[Sequence]], summary: dict[str, Any], console: Console) -> None:
    colour = console.is_terminal and not console.no_color
    if shown:
        legend = Text("what is learned, ").append(Text("what is only read", "dim") if colour else "[what is only read]")
        console.print(legend, style="green" if colour else "")
    for number, sequences in enumerate(shown):
        for sequence in sequences:
            _print_sequence(number, sequence, console, colour=colour)
    lengths = ", ".join(f"{name} {value:,.0f}" for name, value in summary["document_places"].items())
    console.print(
        f"\n{summary['sequences']:,} sequences, {summary['fill']:.2%} filled, "
        f"{summary['documents_per_sequence']:.2f} documents in each\n"
        f"places of a document: {lengths}\n"
        f"{summary['tokens_per_second']:,.0f} tokens a second, the first batch after "
        f"{summary['seconds_to_first_batch']:.2f} s\n"
        f"epoch {summary['epoch']:g}, {summary['skipped_records']:,} records skipped, "
        f"{summary['cut_documents']:,} documents cut or dropped for their length"
    )


def _print_sequence(number: int, sequence: Sequence, console: Console, *, colour: bool) -> None:
    name = f"sequence {number}{f' ({sequence.name})' if sequence.name else ''}"
    documents = f"{len(sequence.pieces)} document{'' if len(sequence.pieces) == 1 else 's'}"
    share = sequence.filled / sequence.places
    border = "bold cyan" if colour else ""
    heading = f"\n{name}: {documents}, {sequence.filled:,} of {sequence.places:,} places ({share:.1%})"
    console.print(Text(heading, border))
    for index, piece in enumerate(sequence.pieces):
        console.print(Text(f"--- document {index + 1}: {piece.places:,} places", border))
        text = Text()
        for learned, run in piece.runs:
            style, before, after = STYLES[learned]
            text.append(run, style) if colour else text.append(f"{before}{run}{after}")
        console.print(text)
    if padding := sequence.places - sequence.filled:
        console.print(Text(f"--- {padding:,} places of padding", border))
