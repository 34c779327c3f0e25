"""Log-probs of answers under the reference, each pair's computed once and kept in the run's folder.

The reference is the weights that the run starts from. Before training, one pass over the pairs that it will see asks
them; training then needs no second model. reference/ holds a file for each process, which only grows, so that what a
killed pass has written is good, and weights.json, by which the reference is known again.
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

from maxhydra.align.loss import SIDES
from maxhydra.config import ConfigError, Problem
from maxhydra.data import Batch, BatchSpec, Row, make_batch
from maxhydra.model.params_hash import fingerprint
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.train.state import Tree

# A pair, by a digest of its tokens and of what is learned of them, and the log-probs of its two answers.
ENTRY = np.dtype([("key", "S32"), ("logprobs", "<f4", 2)])
# Seconds between two lines about how far the pass is.
LINE = 10.0
log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class ReferenceCache:
    """The log-probs of pairs by their content."""

    folder: Path
    known: dict[bytes, np.ndarray]

    @classmethod
    def open(cls, folder: Path) -> "ReferenceCache":
        """What all processes of earlier sessions wrote. An entry that a kill cut short is not one."""
        known: dict[bytes, np.ndarray] = {}
        for path in sorted(folder.glob("*.logprobs")):
            whole = path.stat().st_size // ENTRY.itemsize
            for entry in np.fromfile(path, ENTRY, whole):
                known.setdefault(bytes(entry["key"]), entry["logprobs"])
        return cls(folder, known)

    def lacks(self, rows: Iterable[Row]) -> bool:
        return any(_key(row) not in self.known for row in rows)

    def add(self, rows: Sequence[Row], logprobs: np.ndarray) -> None:
        """Keep the log-probs [rows, 2] of pairs that were not known."""
        new = {_key(row): pair for row, pair in zip(rows, logprobs, strict=True)}
        new = {key: pair for key, pair in new.items() if key not in self.known}
        path = self.folder / f"{jax.process_index()}.logprobs"
        with path.open("ab") as file:
            if rest := file.tell() % ENTRY.itemsize:
                file.truncate(file.tell() - rest)
            file.write(np.array(list(new.items()), ENTRY).tobytes())
        self.known.update(new)

    def require(self, weights: Tree) -> None:
        """What is asked must be what was asked before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, now = self.folder / "weights.json", to_json({"fingerprint": fingerprint(weights)})
        if not path.exists():
            if jax.process_index() == 0:
                replace_file(path, now)
        elif json.loads(path.read_text()) != json.loads(now):
            reason = "are other weights than those that the reference log-probs of this run are from"
            hint = "choose another run.name for another reference"
            raise ConfigError(Problem("checkpoint.load_parameters", reason, hint=hint))

    def batch(self, rows: list[Row], spec: BatchSpec, size: int) -> Batch:
        """A batch with the log-probs of its pairs beside them."""
        return make_batch([{**row, **self._columns(row)} for row in rows], spec, size)

    def _columns(self, row: Row) -> Row:
        if (found := self.known.get(_key(row))) is None:
            reason = "gives pairs whose reference log-probs are not known: it is not what the run began with"
            raise ConfigError(Problem("data", reason, hint="choose another run.name for other data"))
        return {f"{side}_reference": found[i] for i, side in enumerate(SIDES)}


def ask_reference(
    cache: ReferenceCache,
    batches: Iterable[list[Row]],
    spec: BatchSpec,
    *,
    weights: Callable[[], Tree],
    logprobs: Callable[[Tree, Batch], jax.Array],
) -> None:
    """Fill the cache with the pairs of some batches, of which each process has its own rows.

    The weights are asked for only where a pair is not known. A pair's log-probs come from the first batch that has it,
    whenever the pass was interrupted.
    """
    asked: Tree | None = None
    began = said = time.monotonic()
    for number, rows in enumerate(batches, start=1):
        if not _anywhere(cache.lacks(rows)):
            continue
        if asked is None:
            log.info("asking the reference for the log-probs of the pairs")
            asked = weights()
            cache.require(asked)
        places = [len(rows)] if jax.process_count() == 1 else multihost_utils.process_allgather(np.int32(len(rows)))
        size = int(np.sum(places))
        found = np.asarray(logprobs(asked, make_batch(rows, spec, size)))
        cache.add(rows, found[spec.own_rows(size)])
        if time.monotonic() - said > LINE:
            said = time.monotonic()
            log.info("reference log-probs of %d batches", number)
    if asked is not None:
        log.info("reference log-probs of %d pairs in %.1f s", len(cache.known), time.monotonic() - began)


def _anywhere(condition: bool) -> bool:
    """Whether it holds in any process: all take part in a forward pass, or none."""
    return condition if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.bool_(condition)).any())


def _key(row: Row) -> bytes:
    """A digest in letters: as bytes, trailing zeros would be lost in a NumPy array."""
    digest = hashlib.blake2b(digest_size=16)
    for side in SIDES:
        for name in ("tokens", "targets", "weights"):
            digest.update(np.ascontiguousarray(row[f"{side}_{name}"]).tobytes())
    return digest.hexdigest().encode()
