"""Checkpoints verify themselves: damage is detected and named, and the previous checkpoint is used."""

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils

from maxhydra.config import ConfigError
from maxhydra.config.schema.checkpoint import Checkpoint, SaveMode
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.convert.orbax_io import find_checkpoint, read_parameters
from maxhydra.record.checkpoint_manifest import CHECKPOINT_FORMAT, MANIFEST, DamagedCheckpointError, verify_files
from maxhydra.runtime import start
from maxhydra.train.checkpoint import Restored, open_checkpointer, read_state, restore
from maxhydra.train.state import Guard, TrainState
from scripts.flip_bytes import flip, is_harmless, random_flips, read_all
from tests.record.test_checkpoint_manifest import change
from tests.support.cli import run_processes

KEY = "checkpoint.load_parameters"


def make_state(step: int) -> TrainState:
    params = {"layer": {"kernel": jax.random.normal(jax.random.key(step), (64, 32)), "scale": jnp.ones(64)}}
    key = jax.random.key_data(jax.random.key(0))
    return TrainState(jnp.int32(step), params, {}, optax.adam(1e-3).init(params), key, Guard.fresh())


def abstract() -> TrainState:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), make_state(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, one saved in the background and one not."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step, mode in ((1, SaveMode.synchronous), (2, SaveMode.asynchronous)):
        checkpointer = open_checkpointer(folder, Checkpoint(mode=mode, keep=2))
        checkpointer.save(step, make_state(step), {"sequences": step, "streams": []}, {"eval/loss": 2.0})
        checkpointer.close()
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def resume(folder: Path, config: Checkpoint | None = None) -> Restored | None:
    def seek(data: dict[str, Any]) -> None:
        assert int(data["sequences"]) >= 0

    return restore(folder, config or Checkpoint(), abstract(), seek)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def remove_manifest(step: Path) -> None:
    """Turn a checkpoint into one of an earlier version."""
    (step / MANIFEST).unlink()
    path = step / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps({**json.loads(path.read_text()), "custom_metadata": {}}))


@pytest.mark.parametrize("step", [1, 2])
def test_every_file_is_in_the_manifest(saved: Path, step: int) -> None:
    manifest = json.loads((saved / str(step) / MANIFEST).read_text())
    files = {
        path.relative_to(saved / str(step)).as_posix() for path in (saved / str(step)).rglob("*") if path.is_file()
    }
    assert set(manifest["files"]) == files - {MANIFEST} and manifest["format"] == CHECKPOINT_FORMAT
    assert {"data/metadata", "_CHECKPOINT_METADATA", "params/_METADATA", "rest/manifest.ocdbt"} <= files
    assert names(saved) == ["1", "2"]


@pytest.mark.slow
def test_flipped_bytes_are_detected(folder: Path) -> None:
    newest = folder / "2"
    expected = read_all(newest)
    for file, position, bits in random_flips(newest, 40, seed=0):
        flip(file, position, bits)
        with pytest.raises(DamagedCheckpointError) as error:
            read_state(newest, abstract())
        assert error.value.file == file.relative_to(newest).as_posix()
        flip(file, position, bits)
    assert is_harmless(newest, expected)
    restored = read_state(newest, abstract())
    jax.tree.map(np.testing.assert_array_equal, restored.state, make_state(2))
    assert restored.data == {"sequences": 2, "streams": []}


def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = max((folder / "2/params").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip(file, 100, 1)
    restored = resume(folder)
    assert restored is not None and int(restored.state.step) == 1 and restored.source == folder / "1"
    assert names(folder) == ["1", "2.unreadable"]
    message = caplog.messages[0]
    assert str(folder / "2") in message and file.relative_to(folder / "2").as_posix() in message
    assert "params/layer/kernel" in message


@pytest.mark.parametrize("name", [MANIFEST, "rest/_METADATA", "data/metadata"])
def test_a_missing_file_is_damage(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "2" / name).unlink()
    restored = resume(folder)
    assert restored is not None and int(restored.state.step) == 1
    assert f"{name} is missing" in caplog.messages[0]


def test_loading_weights_names_the_previous_checkpoint(folder: Path) -> None:
    params = abstract().params
    flip(next((folder / "2/rest").rglob("d/*")), 10, 1)
    read_parameters(KEY, find_checkpoint(KEY, str(folder)), params)
    flip(folder / "2/params/_METADATA", 10, 1)
    with pytest.raises(ConfigError) as error:
        read_parameters(KEY, find_checkpoint(KEY, str(folder)), params)
    assert f"{KEY}={folder / '2'}: is damaged: params/_METADATA has changed" in str(error.value)
    assert f"{KEY}={folder / '1'}" in str(error.value)


def test_load_full_state_reports_damage(folder: Path, tmp_path: Path) -> None:
    flip(folder / "2/data/metadata", 3, 1)
    with pytest.raises(ConfigError, match=r"load_full_state=.*is damaged: data/metadata has changed"):
        resume(tmp_path / "other", Checkpoint(load_full_state=str(folder)))


def test_checkpoints_of_earlier_versions_are_read_unverified(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "maxhydra")
    remove_manifest(folder / "2")
    restored = resume(folder)
    assert restored is not None and int(restored.state.step) == 2
    assert caplog.messages == [f"checkpoint {folder / '2'} was written before checksums existed, not verified"]


def test_a_newer_format_is_an_error_and_nothing_is_renamed(folder: Path) -> None:
    change(folder / "2" / MANIFEST, format=9, maxhydra="3.0.0")
    with pytest.raises(ConfigError, match=r"has format 9, written by maxhydra 3\.0\.0.*install maxhydra 3\.0\.0"):
        resume(folder)
    assert names(folder) == ["1", "2"]


@pytest.mark.parametrize("position", ['{"at": 3}', "[1]", "3", '{"sequences": "x"}'])
def test_a_data_position_of_another_form(folder: Path, position: str, caplog: pytest.LogCaptureFixture) -> None:
    remove_manifest(folder / "2")
    (folder / "2/data/metadata").write_text(position)
    restored = resume(folder)
    assert restored is not None and int(restored.state.step) == 1
    assert "data/metadata does not hold a data position of this task" in caplog.messages[0]


def test_entries_that_are_not_checkpoints_are_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "²").mkdir()
    (folder / "3").write_text("a file")
    restored = resume(folder)
    assert restored is not None and int(restored.state.step) == 2
    assert sorted(caplog.messages) == [f"{folder / name} is not a checkpoint and is ignored" for name in ("3", "²")]


def test_an_empty_folder_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resume(tmp_path) is None
    assert caplog.messages == [f"{tmp_path} contains no checkpoint"]


def test_a_save_killed_before_its_last_rename_leaves_no_checkpoint(folder: Path) -> None:
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp-complete")
    restored = resume(folder)
    assert restored is not None and int(restored.state.step) == 1
    checkpointer = open_checkpointer(folder, Checkpoint(keep=2))
    checkpointer.save(2, make_state(2), {"sequences": 2}, {})
    checkpointer.close()
    assert names(folder) == ["1", "2"] and verify_files(folder / "2") is None


def save_damage_and_resume(folder: Path) -> None:
    """Program of each of several processes, which share the arrays of a state; one damages the newest checkpoint."""
    start(Hardware(platform=Platform.cpu, compilation_cache=None))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

    def place(leaf: jax.Array) -> jax.Array:
        axes = ["data"] if leaf.shape == (64, 32) else []
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.asarray(leaf)[index])

    states = {step: jax.tree.map(place, make_state(step)) for step in (1, 2)}
    checkpointer = open_checkpointer(folder, Checkpoint(keep=2))
    for step, state in states.items():
        checkpointer.save(step, state, {"sequences": step}, {})
    checkpointer.close()
    if jax.process_index() == 0:
        assert verify_files(folder / "2") is None
        flip(max((folder / "2/params/ocdbt.process_1").rglob("d/*"), key=lambda path: path.stat().st_size), 100, 1)
    multihost_utils.sync_global_devices("damaged")
    restored = restore(folder, Checkpoint(), states[1], lambda position: None)
    assert restored is not None
    print(int(restored.state.step))


@pytest.mark.slow
def test_two_processes_write_one_manifest_and_agree_on_damage(tmp_path: Path) -> None:
    """Each process verifies a share of the files, and both use the previous checkpoint if one finds damage."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    results = run_processes(2, str(folder), cwd=tmp_path, module="tests.train.test_checkpoint")
    assert [result.stdout.split()[-1] for result in results] == ["1", "1"]
    assert names(folder) == ["1", "2.unreadable"]
    files = json.loads((folder / "1" / MANIFEST).read_text())["files"]
    assert any("ocdbt.process_1/d/" in name for name in files) and verify_files(folder / "1") is None


if __name__ == "__main__":
    save_damage_and_resume(Path(sys.argv[1]))
