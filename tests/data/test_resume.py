"""Every source, through its real config: a fresh process resumes from a state saved anywhere, batch for batch.

The positions are within packing windows, within shuffled groups of records and at epoch boundaries: the files are so
small that several epochs pass.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import ROOT, run_ok
from tests.support.data_files import WRITERS

LENGTH = 440
# With MAXHYDRA_FULL=1 a source takes a minute.
POSITIONS, BATCHES = (200, 50) if os.environ.get("MAXHYDRA_FULL") == "1" else (20, 6)

# Batches of four rows from three streams, in windows of a few rows.
COMMON = ["train.seq_len=32", "model.vocab_size=60000", "data.streams=3"]


def open_loader(overrides: list[str]) -> Any:
    from maxhydra.config.compose.composer import compose
    from maxhydra.config.serialize import with_overrides
    from maxhydra.data import BatchSpec, RowSpec, host_loader

    config = with_overrides(compose([*COMMON, *overrides], None).config, ["data.packing.window=6"])
    rows = RowSpec(seq_len=config.train.seq_len, vocab_size=config.model.vocab_size, seed=11)

    class SingleProcessSpec(BatchSpec):
        """A spec under which this process holds all rows."""

        def local_rows(self, batch: int) -> np.ndarray:
            return np.arange(batch)

    return host_loader(config.data, SingleProcessSpec(rows=rows, batch=4, sharding=None))  # type: ignore[arg-type]


def digest(rows: list[dict[str, np.ndarray]]) -> str:
    total = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            column = row[name]
            total.update(name.encode() + (repr(column.item()).encode() if column.dtype == object else column.tobytes()))
    return total.hexdigest()


def resume(job: Path) -> None:
    """Program of the fresh process: restore each state, and print digests of the batches after it."""
    arguments = json.loads(job.read_text())
    loader = open_loader(arguments["overrides"])
    seen = []
    for state in arguments["states"]:
        loader.restore(state)
        seen.append([digest(next(loader)) for _ in range(BATCHES)])
    loader.close()
    print(json.dumps(seen))


@pytest.mark.slow
@pytest.mark.default_cases("mixture")
@pytest.mark.parametrize("source", WRITERS)
def test_a_fresh_process_resumes_from_any_position(source: str, tmp_path: Path) -> None:
    write: Callable[[Path], list[str]] = WRITERS[source]
    overrides = write(tmp_path)
    loader = open_loader(overrides)
    states, digests = [], []
    for _ in range(LENGTH + BATCHES):
        states.append(loader.state())
        digests.append(digest(next(loader)))
    epochs = loader.metrics()["data/epoch"]
    loader.close()
    assert len(set(digests)) > LENGTH // 2, "the batches differ"
    assert epochs > 1.5 or source == "synthetic", "positions are on both sides of an epoch boundary"

    positions = random.Random(source).sample(range(LENGTH), POSITIONS)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"overrides": overrides, "states": [states[at] for at in positions]}))
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    fresh = run_ok(str(job), cwd=tmp_path, module="tests.data.test_resume", PYTHONPATH=python_path)
    for at, seen in zip(positions, json.loads(fresh.stdout.splitlines()[-1]), strict=True):
        assert seen == digests[at : at + BATCHES], f"after batch {at}"


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
