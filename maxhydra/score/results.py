"""Scores into a file that appears when it is complete."""

import math
import os
import tempfile
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.score import LINES
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.score.scorer import SequenceScore
from maxhydra.score.sequences import Sequences


def perplexity(logprobs: np.ndarray) -> float:
    """exp of the mean loss of a token; NaN of a sequence of one token, in which nothing is predicted."""
    with np.errstate(over="ignore"):
        return float(np.exp(-logprobs.mean(dtype=np.float64))) if len(logprobs) else math.nan


def require_writable(path: Path) -> None:
    """ConfigError, before the work and not after it, where no file can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            reason = "is a folder" if path.is_dir() else ""
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
    if reason:
        raise ConfigError(Problem("task.output", reason, value=str(path), hint="choose another file"))


def write_results(path: Path, sequences: Sequences, scores: list[SequenceScore]) -> None:
    """In the order of the input."""
    scores = sorted(scores, key=lambda score: score.number)
    if path.name.endswith(LINES):
        replace_file(path, "".join(_line(sequences, score) for score in scores))
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **_arrays(sequences, scores))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _line(sequences: Sequences, score: SequenceScore) -> str:
    row = sequences.rows[score.number]
    own = {"index": score.number, "tokens": len(row.ids), "perplexity": None, "logprobs": score.logprobs.tolist()}
    if len(score.logprobs):
        own["perplexity"] = perplexity(score.logprobs)
    return to_json({**row.rest, **own, "ids": row.ids.tolist()}) + "\n"


def _arrays(sequences: Sequences, scores: list[SequenceScore]) -> dict[str, np.ndarray]:
    shape = len(scores), sequences.width
    ids, mask, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32)
    logits = None
    if scores[0].logits is not None:
        logits = np.zeros((*shape, scores[0].logits.shape[-1]), np.float32)
    for at, (row, score) in enumerate(zip(sequences.rows, scores, strict=True)):
        ids[at, row.places], mask[at, row.places] = row.ids, 1
        logprobs[at, row.places[1:]] = score.logprobs
        if logits is not None:
            logits[at, row.places] = score.logits
    found: dict[str, np.ndarray] = {"ids": ids, "mask": mask, "logprobs": logprobs}
    found["perplexity"] = np.array([perplexity(score.logprobs) for score in scores])
    return found if logits is None else {**found, "logits": logits}
