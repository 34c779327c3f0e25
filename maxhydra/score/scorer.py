"""Scores sequences of tokens in batches of similar length; input and output files of task=score.

B sequences, S positions, V vocabulary.
"""

import dataclasses
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.inference import LINES
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.sharding import Sharder
from maxhydra.train.loss import map_sequence_chunks, target_logprobs, token_logprobs

KEY = "task.input"
MAX_PROBLEMS = 5
# Text to token ids, and the bytes of the text of each token.
Encode = Callable[[str], tuple[list[int], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One sequence of the input."""

    ids: np.ndarray
    positions: np.ndarray
    """Positions of the tokens in their row of the input array."""
    extra: dict[str, Any]
    """Other keys of the record, which are copied to the output."""
    scored_bytes: int | None = None
    """Bytes of the text of the tokens after the first; None if the text is not known."""


ParsedRow = tuple[str, Sequence | str]
"""A location in the file with its sequence, or with the reason why it is invalid."""


@dataclasses.dataclass(frozen=True)
class Sequences:
    """All sequences of a file; `width` is the row length including padding."""

    rows: list[Sequence]
    width: int


@dataclasses.dataclass(frozen=True)
class SequenceScore:
    """Score of the sequence with index `number`: log-probabilities of its tokens after the first, optional logits."""

    number: int
    logprobs: np.ndarray
    logits: np.ndarray | None
    is_greedy: np.ndarray | None = None
    """Whether each of these tokens is the most likely one, if it was asked for."""


def read_sequences(path: Path, *, encode: Encode, vocab_size: int, max_length: int) -> Sequences:
    """Read all sequences of a file; ConfigError lists up to MAX_PROBLEMS invalid ones."""
    if not path.is_file():
        reason = "does not exist or is not a file"
        raise ConfigError(Problem(KEY, reason, value=str(path), accepted=".jsonl or .npz"))
    parsed, width = _read_lines(path, encode) if path.name.endswith(LINES) else _read_arrays(path)
    problems = []
    for location, sequence in parsed:
        reason = sequence if isinstance(sequence, str) else _find_problem(sequence.ids, vocab_size, max_length)
        if reason:
            problems.append(Problem(KEY, f"{location}: {reason}", value=str(path)))
    if problems:
        raise ConfigError(problems[:MAX_PROBLEMS])
    rows = [sequence for _, sequence in parsed if isinstance(sequence, Sequence)]
    if not rows:
        raise ConfigError(Problem(KEY, "contains no sequences", value=str(path)))
    return Sequences(rows, width)


def _find_problem(ids: np.ndarray, vocab_size: int, max_length: int) -> str:
    if not len(ids):
        return "contains no tokens"
    if len(ids) > max_length:
        return f"has {len(ids)} tokens, but model.context_length is {max_length}"
    if invalid := [int(id) for id in ids if not 0 <= id < vocab_size]:
        return f"contains the token {invalid[0]}, but model.vocab_size is {vocab_size}"
    return ""


def _read_lines(path: Path, encode: Encode) -> tuple[list[ParsedRow], int]:
    parsed: list[ParsedRow] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    parsed.append((f"line {number}", _parse_record(json.loads(line), encode)))
                except (ValueError, OverflowError, RecursionError) as error:
                    parsed.append((f"line {number}", str(error)))
    lengths = [len(sequence.ids) for _, sequence in parsed if isinstance(sequence, Sequence)]
    return parsed, max(lengths, default=0)


def _parse_record(record: Any, encode: Encode) -> Sequence | str:
    """Return the sequence of a JSON record, or the reason why it is invalid."""
    if not isinstance(record, dict) or ("text" in record) == ("ids" in record):
        return "is not an object with either text or ids"
    ids, scored_bytes = record.get("ids", record.get("text")), None
    if isinstance(ids, str):
        ids, token_bytes = encode(ids)
        scored_bytes = int(token_bytes[1:].sum())
    if not isinstance(ids, list) or any(type(id) is not int for id in ids):
        return "text is not a string, or ids is not a list of integers"
    extra = {name: value for name, value in record.items() if name not in ("text", "ids")}
    # Raises for lone surrogates, which JSON can contain and UTF-8 cannot encode.
    to_json(extra).encode()
    return Sequence(np.asarray(ids, np.int64), np.arange(len(ids)), extra, scored_bytes)


def _read_arrays(path: Path) -> tuple[list[ParsedRow], int]:
    ids, mask = _load_ids_and_mask(path)
    positions = [np.flatnonzero(row) for row in mask]
    return [(f"row {row}", Sequence(ids[row][at], at, {})) for row, at in enumerate(positions)], ids.shape[1]


def _load_ids_and_mask(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Load the arrays without pickle, which can run code."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(Problem(KEY, f"cannot be read: {error}", value=str(path))) from None
    ids = arrays.get("ids")
    if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ConfigError(Problem(KEY, "has no integer array ids [B, T]", value=str(path)))
    mask = arrays.get("mask", np.ones(ids.shape, np.int32))
    if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
        reason = f"mask is not an array of zeros and ones with the shape of ids, {ids.shape}"
        raise ConfigError(Problem(KEY, reason, value=str(path)))
    return ids.astype(np.int64), mask


def perplexity(logprobs: np.ndarray) -> float:
    """Return exp of the mean token loss; NaN for a sequence of one token, which has no prediction."""
    with np.errstate(over="ignore"):
        return float(np.exp(-logprobs.mean(dtype=np.float64))) if len(logprobs) else math.nan


def bits_per_byte(logprobs: np.ndarray, scored_bytes: int | None) -> float | None:
    """Return the loss of a text in bits per UTF-8 byte; None if no byte is scored or the text is not known."""
    return None if not scored_bytes else float(-logprobs.sum(dtype=np.float64) / (math.log(2) * scored_bytes))


def overall_bits_per_byte(sequences: Sequences, scores: list[SequenceScore]) -> float | None:
    """Return the bits per byte of all texts together; None if one of the sequences was given as tokens."""
    counts = [row.scored_bytes for row in sequences.rows]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return bits_per_byte(np.concatenate([score.logprobs for score in scores]), sum(known))


def check_writable(path: Path) -> None:
    """Raise ConfigError if the output cannot be written; called before the scores are computed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            reason = "is a directory" if path.is_dir() else ""
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
    if reason:
        raise ConfigError(Problem("task.output", reason, value=str(path), hint="choose another file"))


def write_results(path: Path, sequences: Sequences, scores: list[SequenceScore]) -> None:
    """Write scores in input order; the file appears when it is complete."""
    scores = sorted(scores, key=lambda score: score.number)
    if path.name.endswith(LINES):
        replace_file(path, "".join(_to_line(sequences, score) for score in scores))
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **_to_arrays(sequences, scores))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _to_line(sequences: Sequences, score: SequenceScore) -> str:
    row = sequences.rows[score.number]
    values = {"index": score.number, "tokens": len(row.ids), "perplexity": None, "logprobs": score.logprobs.tolist()}
    if len(score.logprobs):
        values["perplexity"] = perplexity(score.logprobs)
    if row.scored_bytes is not None:
        values["bpb"] = bits_per_byte(score.logprobs, row.scored_bytes)
    return to_json({**row.extra, **values, "ids": row.ids.tolist()}) + "\n"


def _to_arrays(sequences: Sequences, scores: list[SequenceScore]) -> dict[str, np.ndarray]:
    shape = len(scores), sequences.width
    ids, mask, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32)
    logits = None
    if scores[0].logits is not None:
        logits = np.zeros((*shape, scores[0].logits.shape[-1]), np.float32)
    for index, (row, score) in enumerate(zip(sequences.rows, scores, strict=True)):
        ids[index, row.positions], mask[index, row.positions] = row.ids, 1
        logprobs[index, row.positions[1:]] = score.logprobs
        if logits is not None:
            logits[index, row.positions] = score.logits
    arrays: dict[str, np.ndarray] = {"ids": ids, "mask": mask, "logprobs": logprobs}
    arrays["perplexity"] = np.array([perplexity(score.logprobs) for score in scores])
    counts = [row.scored_bytes for row in sequences.rows]
    if any(count is not None for count in counts):
        bits = [bits_per_byte(score.logprobs, count) for score, count in zip(scores, counts, strict=True)]
        arrays["bpb"] = np.array([math.nan if value is None else value for value in bits])
    return arrays if logits is None else {**arrays, "logits": logits}


# Positions whose logits are materialized at a time, unless all logits are returned.
CHUNK = 512
# Smallest padded length.
MIN_LENGTH = 16


@dataclasses.dataclass(frozen=True)
class SequenceScorer:
    """Runs a model over batches of padded sequences."""

    model: ModelDef
    weights: Any
    sharder: Sharder
    batch: int
    with_logits: bool
    with_greedy: bool = False

    def with_weights(self, weights: Any) -> "SequenceScorer":
        """The same programs on other weights of the model."""
        scorer = dataclasses.replace(self, weights=weights)
        scorer.__dict__["_program"] = self._program
        return scorer

    def __call__(self, rows: list[np.ndarray]) -> Iterator[SequenceScore]:
        """Yield a score per sequence of token ids, shortest first to minimize padding; a collective call."""
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            yield from self._score_batch(numbers, [rows[number] for number in numbers])

    def _score_batch(self, numbers: list[int], sequences: list[np.ndarray]) -> Iterator[SequenceScore]:
        shape = _round_up(self.batch, self.sharder.num_shards("act_batch")), self._padded_length(len(sequences[-1]))
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
        logprobs, logits, is_greedy = self._program(self.weights, tokens, segments)
        logprobs = np.asarray(logprobs)
        greedy_rows = None if is_greedy is None else np.asarray(is_greedy)
        for row, (number, ids) in enumerate(zip(numbers, sequences, strict=True)):
            row_logits = None if logits is None else np.asarray(self._take_row(logits, row))[: len(ids)]
            greedy_row = None if greedy_rows is None else greedy_rows[row, : len(ids) - 1]
            yield SequenceScore(number, logprobs[row, : len(ids) - 1], row_logits, greedy_row)

    def _padded_length(self, longest: int) -> int:
        """Round up to a power of two, so that few programs are compiled, and to a multiple of the length shards."""
        power = 1 << (max(longest, MIN_LENGTH) - 1).bit_length()
        return _round_up(power, self.sharder.num_shards("act_length"))

    @cached_property
    def _program(self) -> Any:
        """Map weights, tokens [B, S] and segments [B, S] to next-token log-probabilities [B, S], logits or None, and
        whether each next token is the most likely one, or None.

        Log-probabilities are replicated, so that every process can read them; logits are sharded.
        """
        model, sharder = self.model, self.sharder

        def score(weights: Any, tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, Any, Any]:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            ctx = Context(positions=positions, segments=segments, sharder=sharder, cache=None, dropout_key=None)
            hidden, _ = model.hidden(weights, tokens, ctx)
            targets = jnp.roll(tokens, -1, axis=1)
            if self.with_logits:
                logits = model.logits(weights, hidden, sharder).astype(jnp.float32)
                return target_logprobs(logits, targets), logits, None
            chunk = CHUNK if tokens.shape[1] % CHUNK == 0 else 0
            if self.with_greedy:

                def score_chunk(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
                    logits = model.logits(weights, hidden, sharder).astype(jnp.float32)
                    return target_logprobs(logits, targets), jnp.argmax(logits, axis=-1) == targets

                logprobs, is_greedy = map_sequence_chunks(score_chunk, hidden, targets, chunk=chunk)
                return logprobs, None, is_greedy
            head = model.lm_head(weights, sharder)
            return token_logprobs(head, hidden, targets, chunk=chunk, place=ctx.place), None, None

        logits_sharding = sharder.sharding(("act_batch", "act_length", "act_vocab")) if self.with_logits else None
        greedy_sharding = sharder.sharding(()) if self.with_greedy else None
        return jax.jit(score, out_shardings=(sharder.sharding(()), logits_sharding, greedy_sharding))

    @cached_property
    def _take_row(self) -> Any:
        """Map logits [B, S, V] and a row number to the logits of that row, replicated."""
        return jax.jit(lambda logits, row: logits[row], out_shardings=self.sharder.sharding(()))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
