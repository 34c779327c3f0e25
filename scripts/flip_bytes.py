"""Flip random bytes of a checkpoint, one at a time, and report those that verification does not detect.

python scripts/flip_bytes.py outputs/RUN [--flips 1000] [--seed 0]

Works on a copy of the newest checkpoint. Half of the flips choose the file uniformly, half in proportion to its size.
A flip that is not detected must be harmless: all arrays and the data position are restored unchanged.
"""

import argparse
import collections
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxhydra.convert.orbax_io import find_checkpoint
from maxhydra.record.checkpoint_manifest import verify_files


def random_flips(folder: Path, count: int, seed: int) -> Iterator[tuple[Path, int, int]]:
    """File, position and bits to flip; empty files are left out."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    sizes = [path.stat().st_size for path in files]
    for number in range(count):
        file = draw.choice(files) if number % 2 else draw.choices(files, sizes)[0]
        yield file, draw.randrange(file.stat().st_size), draw.randrange(1, 256)


def flip(file: Path, position: int, bits: int) -> None:
    """XOR one byte of a file with `bits`; a second call undoes it."""
    with open(file, "r+b") as handle:
        handle.seek(position)
        byte = handle.read(1)[0]
        handle.seek(position)
        handle.write(bytes([byte ^ bits]))


def read_all(folder: Path) -> dict[str, Any]:
    """Every array and the data position of a checkpoint, without the manifest's protection."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        items = {
            "params": ocp.args.StandardRestore(),
            "rest": ocp.args.StandardRestore(),
            "data": ocp.args.JsonRestore(),
        }
        return dict(reader.restore(folder, args=ocp.args.Composite(**items)).items())


def is_harmless(folder: Path, expected: dict[str, Any]) -> bool:
    """Whether a checkpoint restores to the expected arrays."""
    found = read_all(folder)
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), found, expected)
    return jax.tree.structure(found) == jax.tree.structure(expected) and all(jax.tree.leaves(same))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder, its checkpoints folder, or one checkpoint")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = find_checkpoint("run", options.run)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / source.name
        shutil.copytree(source, folder)
        expected = read_all(folder)
        for file, position, bits in random_flips(folder, options.flips, options.seed):
            name = file.relative_to(folder).as_posix()
            flip(file, position, bits)
            damage = verify_files(folder)
            outcome = "silent"
            if damage is not None:
                outcome = "detected" if damage.file == name else "detected, other file named"
            elif is_harmless(folder, expected):
                outcome = "harmless"
            flip(file, position, bits)
            counts[outcome] += 1
            counts[f"  in {name.partition('/')[0]}"] += 1
            if outcome != "detected":
                print(f"{outcome}: {name}, byte {position}, bits {bits:#04x}")
        assert verify_files(folder) is None, "the flips were not undone"
    print(f"{options.flips} flips in {source}:")
    for outcome, count in counts.items():
        print(f"{outcome}: {count}")
    sys.exit(1 if counts["silent"] else 0)


if __name__ == "__main__":
    main()
