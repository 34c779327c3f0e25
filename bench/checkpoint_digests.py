"""Cost of the digests of a checkpoint: saves of one state with and without a manifest, alternating. One JSON line.

python bench/checkpoint_digests.py [--megabytes 500] [--rounds 5] [--folder /tmp]

`blocking` is the time that `save` holds up the training loop; `total` ends when the checkpoint has its final name.
`manifest` is the part of `total` between the last write of Orbax and the final rename, which only the manifest causes:
it can be resolved where other processes change the total by more than 1 %. `cpu` is the processor time of all threads.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.record.checkpoint_manifest import verify_files, write_manifest
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.state import Guard, TrainState

ARRAYS = 24


def make_state(megabytes: int) -> TrainState:
    """Weights, and two moments of the same size: random numbers, which compress as badly as trained ones."""
    columns = megabytes * 2**20 // (3 * ARRAYS * 4 * 1024)
    keys = iter(jax.random.split(jax.random.key(0), 3 * ARRAYS))

    def tree() -> dict[str, jax.Array]:
        return {f"layer_{i}": jax.random.normal(next(keys), (1024, columns), jnp.float32) for i in range(ARRAYS)}

    params, key = tree(), jax.random.key_data(jax.random.key(0))
    return TrainState(jnp.zeros((), jnp.int32), params, {}, {"mu": tree(), "nu": tree()}, key, Guard.fresh())


class NoHasher:
    """Replaces the thread that hashes files during a save."""

    def __init__(self, *arguments: object):
        pass


def time_save(folder: Path, state: TrainState, *, has_manifest: bool) -> dict[str, float]:
    """Seconds of the parts of a save, and of verifying the checkpoint."""
    checkpointer = open_checkpointer(folder, Checkpoint(keep=1))
    manifest_s = [0.0]

    def timed(*arguments: Any) -> None:
        start = time.perf_counter()
        write_manifest(*arguments)
        manifest_s[0] = time.perf_counter() - start

    with ExitStack() as patches:
        patches.enter_context(
            mock.patch("maxhydra.train.checkpoint.write_manifest", timed if has_manifest else lambda *arguments: None)
        )
        if not has_manifest:
            patches.enter_context(mock.patch("maxhydra.train.checkpoint.EarlyHasher", NoHasher))
        start, start_cpu = time.perf_counter(), time.process_time()
        checkpointer.save(1, state, {"sequences": 0}, {})
        blocking = time.perf_counter() - start
        checkpointer.wait()
        total, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    checkpointer.close()
    start = time.perf_counter()
    if has_manifest:
        assert verify_files(folder / "1") is None
    verify = time.perf_counter() - start
    return {"blocking": blocking, "total": total, "cpu": cpu, "manifest": manifest_s[0], "verify": verify}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write, e.g. the disk of the runs")
    options = parser.parse_args()
    state = jax.block_until_ready(make_state(options.megabytes))
    times: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(options.rounds + 1):
        # Alternating which comes first: the second save of a pair writes while the disk still flushes the first.
        for has_manifest in (False, True) if number % 2 else (True, False):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                measured = time_save(Path(folder), state, has_manifest=has_manifest)
            times[has_manifest].extend([measured] if number else [])  # the first round warms up
    plain, hashed = (
        {name: statistics.median(each[name] for each in rounds) for name in rounds[0]} for rounds in times.values()
    )
    line = {
        "bench": "checkpoint_digests",
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "blocking_ms": [plain["blocking"] * 1e3, hashed["blocking"] * 1e3],
        "total_s": [plain["total"], hashed["total"]],
        "total_percent": (hashed["total"] / plain["total"] - 1) * 100,
        "cpu_s": [plain["cpu"], hashed["cpu"]],
        "manifest_ms": hashed["manifest"] * 1e3,
        "manifest_percent": hashed["manifest"] / plain["total"] * 100,
        "verify_s": hashed["verify"],
    }
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}))


if __name__ == "__main__":
    main()
