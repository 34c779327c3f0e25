"""Real processes share a packed source: four, then two, then one yield the batches of a single process."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.cli import ROOT, run_processes
from tests.support.data_files import write_jsonl

BATCH = 8


def read_batches(overrides: list[str], state: dict[str, Any] | None, batches: int) -> None:
    """Program of each process: its rows of some batches, and the state of all streams afterwards."""
    from maxhydra.config.compose.composer import compose
    from maxhydra.config.schema.hardware import RULES, Hardware, Mesh, Platform
    from maxhydra.runtime import start

    start(Hardware(platform=Platform.cpu, compilation_cache=None))
    from maxhydra.data import BatchSpec, RowSpec, train_loader
    from maxhydra.sharding import Sharder, build_mesh

    config = compose(overrides, None).config
    sharding = Sharder(build_mesh(Mesh(data=-1, fsdp=1)), RULES).sharding(("act_batch", "act_length"))
    spec = BatchSpec(rows=RowSpec(seq_len=32, vocab_size=259, seed=3), batch=BATCH, sharding=sharding)
    loader = train_loader(config.data, spec)
    if state:
        loader.restore(state)
    seen = []
    for _ in range(batches):
        shards = next(loader)["tokens"].addressable_shards
        seen.append([[shard.index[0].indices(BATCH)[0], shard.data.tolist()] for shard in shards])
    print(json.dumps({"seen": seen, "state": loader.state()}))
    loader.close()
    if jax.distributed.is_initialized():
        # The others end first, which process 0 must not take for a loss.
        index = jax.process_index()
        jax.distributed.shutdown()
        time.sleep(1.0 if index == 0 else 0.0)


def run(
    processes: int, overrides: list[str], state: dict[str, Any] | None, batches: int, *, folder: Path
) -> tuple[np.ndarray, Any]:
    """Combine the batches of all processes, and return the state that each of them reports."""
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    job = json.dumps([overrides, state, batches])
    module = "tests.data.test_processes"
    results = run_processes(processes, job, cwd=folder, module=module, PYTHONPATH=python_path)
    combined = np.full((batches, BATCH, 32), -1)
    states = []
    for process in results:
        output = json.loads(process.stdout.splitlines()[-1])
        states.append(output["state"])
        for number, shards in enumerate(output["seen"]):
            for first, rows in shards:
                combined[number, first : first + len(rows)] = rows
    assert all(state == states[0] for state in states), "every process knows the position of all"
    assert (combined >= 0).all()
    return combined, states[0]


@pytest.mark.exhaustive
def test_four_processes_then_two_then_one(tmp_path: Path) -> None:
    overrides = [*write_jsonl(tmp_path), "data.packing.window=4", "train.seq_len=32"]
    alone, _ = run(1, [*overrides, "data.streams=4"], None, 30, folder=tmp_path)
    four, state = run(4, overrides, None, 11, folder=tmp_path)
    two, state = run(2, overrides, state, 9, folder=tmp_path)
    one, _ = run(1, overrides, state, 10, folder=tmp_path)
    np.testing.assert_array_equal(np.concatenate([four, two, one]), alone)


if __name__ == "__main__":
    read_batches(*json.loads(sys.argv[1]))
