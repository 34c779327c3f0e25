"""Real processes share a packed source: four, then two, then one give the batches that one alone gives."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import ROOT, finished_together
from tests.support.data_files import write_jsonl

BATCH = 8


def part(overrides: list[str], state: dict[str, Any] | None, batches: int) -> None:
    """What each process does: its own rows of some batches, and the state of all after."""
    from maxhydra.config.compose.composer import compose
    from maxhydra.config.schema.hardware import Hardware, Platform
    from maxhydra.config.schema.mesh import RULES, Mesh
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


def run(
    processes: int, overrides: list[str], state: dict[str, Any] | None, batches: int, *, folder: Path
) -> tuple[np.ndarray, Any]:
    """All batches that some processes give together, and the state that each of them reports."""
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    job = json.dumps([overrides, state, batches])
    module = "tests.test_data_processes"
    ended = finished_together(processes, job, cwd=folder, module=module, PYTHONPATH=places)
    whole = np.full((batches, BATCH, 32), -1)
    states = []
    for process in ended:
        told = json.loads(process.stdout.splitlines()[-1])
        states.append(told["state"])
        for number, shards in enumerate(told["seen"]):
            for first, rows in shards:
                whole[number, first : first + len(rows)] = rows
    assert all(state == states[0] for state in states), "every process knows the position of all"
    assert (whole >= 0).all()
    return whole, states[0]


@pytest.mark.slow
def test_four_processes_then_two_then_one(tmp_path: Path) -> None:
    overrides = [*write_jsonl(tmp_path), "data.packing.window=4", "train.seq_len=32"]
    alone, _ = run(1, [*overrides, "data.streams=4"], None, 30, folder=tmp_path)
    four, state = run(4, overrides, None, 11, folder=tmp_path)
    two, state = run(2, overrides, state, 9, folder=tmp_path)
    one, _ = run(1, overrides, state, 10, folder=tmp_path)
    np.testing.assert_array_equal(np.concatenate([four, two, one]), alone)


if __name__ == "__main__":
    part(*json.loads(sys.argv[1]))
