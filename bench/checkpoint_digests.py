"""Cost of the digests of a checkpoint: saves of one state with and without a manifest, alternating. One JSON line.

python bench/checkpoint_digests.py [--megabytes 500] [--rounds 5] [--folder /tmp]

`blocking` is the time that `save` holds up the training loop; `total` ends when the checkpoint has its final name.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from maxhydra.config.schema.run import Checkpoint
from maxhydra.record.checkpoint_manifest import verify_files
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


def time_save(folder: Path, state: TrainState, *, has_manifest: bool) -> tuple[float, float, float]:
    """Seconds of the blocking part of a save, of all of it, and of verifying the checkpoint."""
    checkpointer = open_checkpointer(folder, Checkpoint(keep=1))
    switch = nullcontext() if has_manifest else mock.patch("maxhydra.train.checkpoint.write_manifest")
    with switch:
        start = time.perf_counter()
        checkpointer.save(1, state, {"sequences": 0}, {})
        blocking = time.perf_counter() - start
        checkpointer.wait()
        total = time.perf_counter() - start
    checkpointer.close()
    start = time.perf_counter()
    if has_manifest:
        assert verify_files(folder / "1") is None
    return blocking, total, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write, e.g. the disk of the runs")
    options = parser.parse_args()
    state = jax.block_until_ready(make_state(options.megabytes))
    times: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for number in range(options.rounds + 1):
        for has_manifest, seconds in times.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                measured = time_save(Path(folder), state, has_manifest=has_manifest)
            seconds.extend([measured] if number else [])  # the first round warms up
    (blocking, total, _), (hashed_blocking, hashed_total, verify) = (
        map(statistics.median, zip(*seconds, strict=True)) for seconds in times.values()
    )
    line = {
        "bench": "checkpoint_digests",
        "megabytes": options.megabytes,
        "blocking_ms": [blocking * 1e3, hashed_blocking * 1e3],
        "blocking_percent_of_save": (hashed_blocking - blocking) / total * 100,
        "total_s": [total, hashed_total],
        "total_percent": (hashed_total / total - 1) * 100,
        "verify_s": verify,
    }
    print(json.dumps(line, default=float))


if __name__ == "__main__":
    main()
