"""Real processes share a packed source: four, then two, then one give the batches that one alone gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datafiles import write_jsonl
from running import ROOT

BATCH = 8


def part(overrides: list[str], state: dict[str, Any] | None, batches: int) -> None:
    """What each process does: its own rows of some batches, and the state of all after."""
    from maxhydra.config.compose import compose
    from maxhydra.config.hardware import Hardware, Platform
    from maxhydra.config.mesh import RULES, Mesh
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


def run(processes: int, overrides: list[str], state: dict[str, Any] | None, batches: int) -> tuple[np.ndarray, Any]:
    """All batches that some processes give together, and the state that each of them reports."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    clean |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    many = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)} if processes > 1 else {}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps([overrides, state, batches])],
            env=clean | many | {"JAX_PROCESS_ID": str(i)} if many else clean,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    whole = np.full((batches, BATCH, 32), -1)
    states = []
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        told = json.loads(out.splitlines()[-1])
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
    alone, _ = run(1, [*overrides, "data.streams=4"], None, 30)
    four, state = run(4, overrides, None, 11)
    two, state = run(2, overrides, state, 9)
    one, _ = run(1, overrides, state, 10)
    np.testing.assert_array_equal(np.concatenate([four, two, one]), alone)


if __name__ == "__main__":
    part(*json.loads(sys.argv[1]))
