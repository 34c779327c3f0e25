"""Cached log-probs of completion pairs under the reference, computed once and stored in the run's folder.

The reference is the weights that the run starts from. One pass over the pairs before training computes their log-probs,
so that training needs no second model. reference/ has one append-only file per process, so that the entries of a killed
pass stay valid, and weights.json, the fingerprint of the reference.
"""

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxhydra.align.loss import ROLES
from maxhydra.config import ConfigError, Problem
from maxhydra.data import Batch, BatchSpec, Row, make_batch
from maxhydra.model.stored_params import fingerprint
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.train.loss import Tree

# A digest of a pair's tokens, targets and weights, and the log-probs of its two completions.
ENTRY = np.dtype([("key", "S32"), ("logprobs", "<f4", 2)])
# Seconds between two progress lines.
LOG_INTERVAL = 10.0
log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class ReferenceCache:
    """Reference log-probs of pairs, by a digest of their content."""

    folder: Path
    entries: dict[bytes, np.ndarray]

    @classmethod
    def open(cls, folder: Path) -> "ReferenceCache":
        """Read the entries of all processes of earlier sessions. A truncated last entry is ignored."""
        entries: dict[bytes, np.ndarray] = {}
        for path in sorted(folder.glob("*.logprobs")):
            count = path.stat().st_size // ENTRY.itemsize
            for entry in np.fromfile(path, ENTRY, count):
                entries.setdefault(bytes(entry["key"]), entry["logprobs"])
        return cls(folder, entries)

    def lacks(self, rows: Iterable[Row]) -> bool:
        return any(_key(row) not in self.entries for row in rows)

    def add(self, rows: Sequence[Row], logprobs: np.ndarray) -> None:
        """Store the log-probs [rows, 2] of pairs that are not in the cache yet."""
        new = {_key(row): pair for row, pair in zip(rows, logprobs, strict=True)}
        new = {key: pair for key, pair in new.items() if key not in self.entries}
        path = self.folder / f"{jax.process_index()}.logprobs"
        with path.open("ab") as file:
            if rest := file.tell() % ENTRY.itemsize:
                file.truncate(file.tell() - rest)
            file.write(np.array(list(new.items()), ENTRY).tobytes())
        self.entries.update(new)

    def require(self, weights: Tree) -> None:
        """Raise a ConfigError if the cache belongs to other weights."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, content = self.folder / "weights.json", to_json({"fingerprint": fingerprint(weights)})
        if not path.exists():
            if jax.process_index() == 0:
                replace_file(path, content)
        elif json.loads(path.read_text()) != json.loads(content):
            reason = "are different weights from those of the run's cached reference log-probs"
            hint = "choose another run.name for another reference"
            raise ConfigError(Problem("checkpoint.load_parameters", reason, hint=hint))

    def batch(self, rows: list[Row], spec: BatchSpec, size: int) -> Batch:
        """A batch that includes the reference log-probs of its pairs."""
        return make_batch([{**row, **self._columns(row)} for row in rows], spec, size)

    def _columns(self, row: Row) -> Row:
        if (logprobs := self.entries.get(_key(row))) is None:
            reason = "has pairs without cached reference log-probs, so it is not the data that the run started with"
            raise ConfigError(Problem("data", reason, hint="choose another run.name for other data"))
        return {f"{role}_reference": logprobs[i] for i, role in enumerate(ROLES)}


def fill_reference_cache(
    cache: ReferenceCache,
    batches: Iterable[list[Row]],
    spec: BatchSpec,
    *,
    load_weights: Callable[[], Tree],
    logprobs: Callable[[Tree, Batch], jax.Array],
) -> None:
    """Compute the log-probs of the pairs that the cache lacks; each process passes its own rows of the batches.

    The weights are loaded only if a pair is missing. A pair's log-probs always come from the first batch that contains
    it, even if the pass was interrupted.
    """
    weights: Tree | None = None
    start_time = last_line = time.monotonic()
    for number, rows in enumerate(batches, start=1):
        if not _any_process(cache.lacks(rows)):
            continue
        if weights is None:
            log.info("computing the reference log-probs of the pairs")
            weights = load_weights()
            cache.require(weights)
        counts = [len(rows)] if jax.process_count() == 1 else multihost_utils.process_allgather(np.int32(len(rows)))
        size = int(np.sum(counts))
        batch_logprobs = np.asarray(logprobs(weights, make_batch(rows, spec, size)))
        cache.add(rows, batch_logprobs[spec.local_rows(size)])
        if time.monotonic() - last_line > LOG_INTERVAL:
            last_line = time.monotonic()
            log.info("reference log-probs of %d batches", number)
    if weights is not None:
        log.info("reference log-probs of %d pairs in %.1f s", len(cache.entries), time.monotonic() - start_time)


def _any_process(condition: bool) -> bool:
    """Whether the condition holds in any process: either all take part in a forward pass or none."""
    return condition if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.bool_(condition)).any())


def _key(row: Row) -> bytes:
    """A hexadecimal digest; raw bytes would lose trailing zeros in a NumPy array."""
    digest = hashlib.blake2b(digest_size=16)
    for role in ROLES:
        for name in ("tokens", "targets", "weights"):
            digest.update(np.ascontiguousarray(row[f"{role}_{name}"]).tobytes())
    return digest.hexdigest().encode()
