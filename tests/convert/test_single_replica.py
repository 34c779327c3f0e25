"""Arrays that several processes hold are read by one of them and sent to the others, bit for bit."""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra.convert.orbax_io import read_trees
from maxhydra.convert.single_replica import plan_reads
from tests.support.cli import CLUSTER_VARIABLES, start_processes

# Replicated over the processes, except `split`; `small` is read by both.
SHAPES = {"a": ("float32", 512), "b": ("float32", 512), "half": ("bfloat16", 1024), "flag": ("bool", 2048)}
SHAPES |= {"split": ("float32", 512), "small": ("float32", 8)}


def content(name: str) -> np.ndarray:
    """Random values that do not compress, with -0 and infinity."""
    dtype, rows = SHAPES[name]
    values = np.random.default_rng(len(name)).normal(size=(rows, 1024))
    values[0, :3] = -0.0, np.inf, -np.inf
    return values > 0 if dtype == "bool" else values.astype(jnp.dtype(dtype))


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def compare_reads(folder: Path) -> None:
    """One of two processes: read with and without a single replica."""
    address, count, index = (os.environ[name] for name in CLUSTER_VARIABLES)
    jax.distributed.initialize(address, int(count), int(index))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: PartitionSpec("data" if name == "split" else None) for name in SHAPES}
    arrays = {
        name: jax.make_array_from_callback(value.shape, NamedSharding(mesh, specs[name]), value.__getitem__)
        for name, value in ((name, content(name)) for name in SHAPES)
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(folder / "it", args=ocp.args.Composite(params=ocp.args.PyTreeSave(arrays)))
    target = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for name, each in arrays.items()
    }
    report = {"planned": sorted(plan_reads(target)), "bytes": []}
    for single_replica in (False, True, False, True):
        before = bytes_read()
        found = read_trees(folder / "it", {"params": target}, single_replica=single_replica)["params"]
        report["bytes"].append(bytes_read() - before)
        for name, array in found.items():
            assert array.sharding == target[name].sharding
            for own, expected in zip(array.addressable_shards, arrays[name].addressable_shards, strict=True):
                assert np.asarray(own.data).tobytes() == np.asarray(expected.data).tobytes(), name
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(report))


@pytest.mark.slow
def test_one_of_two_processes_reads_for_both(tmp_path: Path) -> None:
    processes = start_processes(2, str(tmp_path), cwd=tmp_path, module="tests.convert.test_single_replica")
    codes = [process.wait(240) for process in processes]
    assert codes == [0, 0], (tmp_path / "console.0").read_text()[-2000:]
    reports = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    for report in reports:
        assert report["planned"] == ["a", "b", "flag", "half"]
        _, _, every, single = report["bytes"]
        assert every > 6e6 and single < 0.7 * every, report["bytes"]
    # Together they read each of the replicated arrays once, and both read the small one and the metadata.
    assert sum(report["bytes"][3] for report in reports) < 0.6 * sum(report["bytes"][2] for report in reports)


if __name__ == "__main__":
    compare_reads(Path(sys.argv[1]))
