"""Checkpoints on the hosts' own disks: parts, copies on other hosts, damage, and restarts without a host's disk."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.record.checkpoint_manifest import DamagedCheckpointError
from maxhydra.record.local_checkpoints import (
    HostArray,
    Lineage,
    Part,
    choose_holders,
    complete_steps,
    copy_part,
    list_parts,
    merge_indices,
    process_folder,
    write_part,
)
from maxhydra.runtime.peers import EXIT_LOST
from maxhydra.runtime.transfer import Address, FileClient, FileServer, PartReader, Place, TransferError
from maxhydra.train.local_tier import HostDisks, shard_owners
from tests.support.cli import SMALL, losses, start_processes
from tests.support.polling import wait_for

CREATED = "2026-11-17T00:00:00Z"
LINEAGE = Lineage(CREATED, [None])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def part_of(step: int = 4, number: int = 0, parts: int = 2, session: int = 1) -> Part:
    return Part(CREATED, session, step, number, parts)


def rows_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, 64, np.uint8)


def write(root: Path, part: Part) -> None:
    """Half of an array of 128 bytes, as the part of one of two processes."""
    bounds = ((64 * part.number, 64 * part.number + 64),)
    array = HostArray([128], "uint8", [(bounds, rows_of(part.number))])
    write_part(process_folder(root, part.number), part, {"params/w": array}, {"row": part.step})


@pytest.fixture
def server(root: Path) -> Iterator[FileServer]:
    root.mkdir()
    found = FileServer(root, "127.0.0.1")
    yield found
    found.close()


class TestTransfer:
    def test_reads_and_copies_files(self, root: Path, server: FileServer, tmp_path: Path) -> None:
        content = random.Random(0).randbytes(3 * 2**20 + 5)
        (root / "a").mkdir()
        (root / "a" / "b").write_bytes(content)
        client = FileClient(server.address)
        assert client.read("a/b") == content
        assert client.read("a/b", 7, 100) == content[7:107]
        assert client.read("a/b", len(content) - 3, 100) == content[-3:]
        client.copy("a/b", tmp_path / "copies" / "b")
        assert (tmp_path / "copies" / "b").read_bytes() == content
        client.close()

    def test_rejects_other_folders_and_tokens(self, root: Path, server: FileServer) -> None:
        (root.parent / "secret").write_text("no")
        client = FileClient(server.address)
        for name in ("missing", "../secret", str(root.parent / "secret"), "."):
            with pytest.raises(FileNotFoundError):
                client.read(name)
        stranger = FileClient(server.address._replace(token="00" * 16))
        with pytest.raises(TransferError, match=r"cannot read from 127\.0\.0\.1"):
            stranger.read("missing")

    def test_a_process_that_is_gone_is_named(self, server: FileServer) -> None:
        client = FileClient(server.address)
        server.close()
        with pytest.raises(TransferError, match=f"127.0.0.1:{server.address.port}"):
            client.read("a")


class TestParts:
    def test_copies_are_equal_and_verified(self, root: Path, server: FileServer, tmp_path: Path) -> None:
        part, client = part_of(number=1), FileClient(server.address)

        def read(name: str, path: Path) -> None:
            client.copy(f"process-1/4/1/{name}", path)

        other = tmp_path / "other"
        with pytest.raises(FileNotFoundError):
            copy_part(process_folder(other, 0), part, read)
        write(root, part)
        copy_part(process_folder(other, 0), part, read)
        assert list(list_parts(other)) == [("process-0/4/1", part)]
        shutil.rmtree(other)
        flip(root / "process-1/4/1/arrays/params/w", 5)
        with pytest.raises(DamagedCheckpointError, match="arrays/params/w has changed"):
            copy_part(process_folder(other, 0), part, read)
        assert not list(list_parts(other)) and not list((other / "process-0" / "4").iterdir())

    def test_a_step_needs_all_parts_of_one_session(self) -> None:
        both = [part_of(4, 0), part_of(4, 1)]
        assert [*complete_steps([*both, part_of(8, 0)], LINEAGE)] == [4]
        sessions = [*both, part_of(8, 0), part_of(8, 1, session=2), part_of(9, 0, parts=1)]
        assert [*complete_steps(sessions, LINEAGE)] == [4, 9]

    @pytest.mark.parametrize(
        ("starts", "expected"),
        [
            ([0, None], [4, 8]),  # the next session restores
            ([0, 8, None], [4, 8]),  # it has restored step 8, and ended before it saved
            ([0, 4, None], [4]),  # it has started from step 4, and trained other steps 5 to 8
            ([0, 0, None], []),
        ],
    )
    def test_steps_that_a_later_session_has_replaced_are_ignored(self, starts: list, expected: list[int]) -> None:
        parts = [part_of(step, number) for step in (4, 8) for number in (0, 1)]
        assert [*complete_steps(parts, Lineage(CREATED, starts))] == expected
        assert not complete_steps(parts, Lineage("another time", starts))

    @pytest.mark.parametrize(
        ("hosts", "expected"),
        [
            (["a", "b"], [1, 0]),
            (["a", "a"], [1, 0]),
            (["a", "a", "b", "b"], [2, 3, 0, 1]),
            (["a", "a", "b"], [2, 2, 0]),
            (["a", "b", "c"], [1, 2, 0]),
        ],
    )
    def test_copies_are_on_other_hosts(self, hosts: list[str], expected: list[int]) -> None:
        assert choose_holders(hosts) == expected


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def read_all(reader: PartReader, parts: list[Part]) -> bytes:
    """The array of `write`, of all parts."""
    arrays = merge_indices([reader.read_index(part) for part in parts])
    return b"".join(reader.read_shard("params/w", shard) for shard in arrays["params/w"].shards)


@pytest.mark.parametrize("seed", range(20))
def test_a_bit_flip_in_a_copy_is_named_and_the_original_is_read(seed: int, root: Path, tmp_path: Path) -> None:
    """A new host reads the part of process 0 from the damaged copy of process 1, then from process 0; else it fails."""
    parts, places = [part_of(number=0), part_of(number=1)], [[Place(1, "process-1/4/0")], [Place(1, "process-1/4/1")]]
    for part in parts:
        write(root, part)
    shutil.copytree(root / "process-0/4/0", root / "process-1/4/0")
    source = random.Random(seed)
    files = sorted(path for path in (root / "process-1/4/0").rglob("*") if path.is_file())
    damaged = files[seed % len(files)]
    flip(damaged, source.randrange(damaged.stat().st_size), source.randrange(8))
    servers = [FileServer(root, "127.0.0.1") for _ in range(2)]
    peers: list[Address | None] = [*(server.address for server in servers), None]
    reader = PartReader(tmp_path / "new", [2], peers, [[*places[0], Place(0, "process-0/4/0")], places[1]])
    assert read_all(reader, parts) == rows_of(0).tobytes() + rows_of(1).tobytes()
    [line] = reader.damages
    assert re.search(rf"process-1/4/0 of process 1 is damaged: .*{damaged.name}", line)
    without_original = PartReader(tmp_path / "new", [2], peers, places)
    with pytest.raises(DamagedCheckpointError, match=rf"part of process 0 has no intact copy.*{damaged.name}"):
        read_all(without_original, parts)
    for server in servers:
        server.close()


def tree_of(mesh: jax.sharding.Mesh, step: int) -> dict:
    """Arrays of several dtypes: sharded over one or two axes, and replicated."""
    values = jax.random.normal(jax.random.key(step), (8, 6))
    specs = {"both": ("x", "y"), "rows": ("x", None), "columns": (None, "y"), "none": ()}
    arrays = {name: jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec))) for name, spec in specs.items()}
    scalar = jax.device_put(jnp.int32(step), NamedSharding(mesh, PartitionSpec()))
    return {**arrays, "half": arrays["both"].astype(jnp.bfloat16), "inner": {"step": scalar}}


def abstract(tree: dict) -> dict:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("x", "y"), devices=jax.devices()[: shape[0] * shape[1]])


class TestHostDisks:
    @pytest.mark.parametrize("shape", [(4, 2), (2, 1), (1, 2), (1, 1)])
    def test_restores_on_another_mesh(self, root: Path, shape: tuple[int, int]) -> None:
        tier = HostDisks(root, LINEAGE, has_copies=False)
        for step in (2, 4, 6, 8):
            tier.save(step, tree_of(mesh_of(4, 2), step), {"row": step})
        tier.wait()
        assert tier.steps() == [4, 6, 8]
        expected = tree_of(mesh_of(*shape), 6)
        found, data, _ = tier.read(6, abstract(expected))
        assert data == {"row": 6}
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert one.sharding == other.sharding and one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        tier.close(newest=6)
        assert HostDisks(root, LINEAGE, has_copies=False).steps() == [8]

    def test_a_saved_state_does_not_change_with_the_next_step(self, root: Path) -> None:
        """The step donates its buffers, which the CPU backend shares with NumPy."""
        tier, sharding = HostDisks(root, LINEAGE, has_copies=False), tree_of(mesh_of(2, 1), 1)["rows"].sharding
        state = jax.device_put(np.ones((8, 6), np.float32), sharding) + 1
        tier.save(1, {"w": state}, {})
        jax.block_until_ready(jax.jit(lambda array: array * 0, donate_argnums=0)(state))
        assert state.is_deleted()
        tier.wait()
        found, _, _ = tier.read(1, {"w": jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=sharding)})
        np.testing.assert_array_equal(found["w"], 2)
        tier.close(newest=0)

    def test_another_model_is_not_used(self, root: Path) -> None:
        tier, tree = HostDisks(root, LINEAGE, has_copies=False), tree_of(mesh_of(1, 1), 1)
        tier.save(1, tree, {})
        tier.wait()
        other = {**abstract(tree), "none": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=tree["none"].sharding)}
        with pytest.raises(DamagedCheckpointError, match=r"none has the shape \(8, 6\) instead of \(3,\)"):
            tier.read(1, other)
        tier.close(newest=1)
        assert not root.exists()

    def test_a_full_disk_does_not_end_training(self, root: Path, caplog: pytest.LogCaptureFixture) -> None:
        tier = HostDisks(root, LINEAGE, has_copies=False)
        (root / "process-0").write_text("not a folder")
        tier.save(1, tree_of(mesh_of(1, 1), 1), {})
        tier.wait()
        assert "local checkpoint of step 1 is incomplete" in caplog.text
        (root / "process-0").unlink()
        tier.close(newest=1)


def test_equal_shards_are_saved_by_different_devices() -> None:
    sharding = NamedSharding(mesh_of(4, 2), PartitionSpec(None, "y"))
    owners = [shard_owners(sharding, (8, 6), first=first) for first in range(4)]
    for found in owners:
        assert [bounds for bounds, _ in found] == [((0, 8), (0, 3)), ((0, 8), (3, 6))]
    assert len({device for found in owners for _, device in found}) == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.peer_copies=1"], r"checkpoint\.peer_copies.*there are none"),
        (["checkpoint.local_folder=s3://b/f", "checkpoint.local_every=1"], r"checkpoint\.local_folder.*is a URL"),
        (["checkpoint.mode=off", "checkpoint.local_every=1"], r"checkpoint\.local_every.*mode is off"),
        (["checkpoint.mode=off", "checkpoint.max_overhead=0.1"], r"checkpoint\.max_overhead.*mode is off"),
        (["checkpoint.max_overhead=0"], r"checkpoint\.max_overhead"),
    ],
)
def test_invalid_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(overrides)


@pytest.mark.exhaustive
def test_a_new_host_restores_from_the_copies_of_another_one(tmp_path: Path) -> None:
    """After kill -9, the disk of process 1 is lost. The run repeats the steps since its last local save exactly."""
    outputs = tmp_path / "outputs"
    run = [*SMALL, "train.eval_batches=0", "optimizer/schedule=constant", f"run.outputs={outputs}", "run.name=it"]
    run += ["checkpoint.every=10000", "checkpoint.local_every=5", "checkpoint.peer_copies=1"]
    run += ["checkpoint.local_folder=disk", "train.steps=10000"]
    processes = start_processes(2, *run, cwd=tmp_path, folder="host-{}")
    disks = [tmp_path / f"host-{index}" / "disk" / "/".join((outputs / "it").parts[1:]) for index in range(2)]
    wait_for(lambda: all(list(disk.glob(f"process-{n}/[1-9]?*/{1 - n}")) for n, disk in enumerate(disks)))
    wait_for(lambda: max(losses(outputs / "it")) > 12)
    processes[1].kill()
    assert processes[0].wait(240) == EXIT_LOST
    before = losses(outputs / "it")
    shutil.rmtree(tmp_path / "host-1" / "disk")
    again = start_processes(2, *run, f"train.steps={max(before) + 1}", cwd=tmp_path, folder="host-{}")
    assert [process.wait(240) for process in again] == [0, 0]
    console, facts = (tmp_path / "console.0").read_text(), json.loads((outputs / "it" / "run.json").read_text())
    start = int(re.findall(r"read the local checkpoint of step (\d+)", console)[0])
    assert facts["sessions"][1]["start_step"] == start and 10 <= start <= max(before) + 1
    after = losses(outputs / "it")
    assert {step: after[step] for step in before} == before
    assert not any(disk.exists() for disk in disks), "the last checkpoint of the run replaces the local ones"
