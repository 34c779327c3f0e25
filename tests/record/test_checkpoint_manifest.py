"""The manifest of a checkpoint: what counts as damage, what identifies a checkpoint, and format versions."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from maxhydra.record.atomic_io import NewerFormatError, migrate_format
from maxhydra.record.checkpoint_manifest import (
    CHECKPOINT_FORMAT,
    MANIFEST,
    DamagedCheckpointError,
    EarlyHasher,
    _content_digest,
    manifest_digest,
    verify_files,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the items of a checkpoint."""
    for name in ("params/d/weights", "rest/d/moments", "data/metadata", "quantization.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 100)
    write_manifest(tmp_path)
    return tmp_path


def change(path: Path, **values: object) -> None:
    """Change entries of a manifest, and its digest with them."""
    content = {**json.loads(path.read_text()), **values}
    del content["digest"]
    path.write_text(json.dumps({**content, "digest": _content_digest(content)}))


def test_every_changed_byte_is_found(folder: Path) -> None:
    assert verify_files(folder) is None
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        content = path.read_bytes()
        path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
        damage = verify_files(folder)
        assert damage is not None and damage.file == path.relative_to(folder).as_posix()
        assert "xxh3-128 digest differs" in str(damage)
        path.write_bytes(content)
    assert verify_files(folder) is None


def test_every_changed_byte_of_the_manifest_is_found_or_harmless(folder: Path) -> None:
    path, digest = folder / MANIFEST, manifest_digest(folder)
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        damage = verify_files(folder)
        assert damage.file == MANIFEST if damage is not None else manifest_digest(folder) == digest


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("params/d/weights", None, "params/d/weights is missing"),
        ("params/d/weights", b"short", "params/d/weights has 5 bytes instead of 1,600"),
        ("params/d/more", b"", "params/d/more is not part of the checkpoint"),
        (MANIFEST, b"{", "manifest.json cannot be read"),
        (MANIFEST, b"[]", "manifest.json cannot be read"),
        (MANIFEST, b"{}", "manifest.json cannot be read"),
    ],
)
def test_missing_added_and_truncated_files(folder: Path, name: str, content: bytes | None, message: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert str(verify_files(folder)) == message


def test_items_limit_the_check(folder: Path) -> None:
    """Weights can be loaded without optimizer states, which may be deleted to save space."""
    (folder / "rest/d/moments").unlink()
    (folder / ".nfs0001").write_bytes(b"a file that the file system adds")
    assert verify_files(folder, ["params"]) is None
    assert verify_files(folder) is not None
    (folder / "quantization.yaml").write_bytes(b"other")
    assert "quantization.yaml has 5 bytes" in str(verify_files(folder, ["params"]))


def test_parts_cover_all_files(folder: Path) -> None:
    for path in [path for path in folder.rglob("*/*") if path.is_file()]:
        content = path.read_bytes()
        path.write_bytes(content[::-1])
        assert sum(verify_files(folder, part=part, parts=3) is not None for part in range(3)) == 1
        path.write_bytes(content)


def test_the_digest_identifies_the_content(folder: Path) -> None:
    first = manifest_digest(folder)
    write_manifest(folder)
    assert first is not None and manifest_digest(folder) == first
    (folder / "data/metadata").write_bytes(b"other")
    write_manifest(folder)
    assert manifest_digest(folder) != first


def test_a_checkpoint_without_manifest(folder: Path) -> None:
    """Checkpoints of earlier versions have none; Orbax's metadata shows if it was lost."""
    (folder / MANIFEST).unlink()
    assert manifest_digest(folder) is None and verify_files(folder) is None
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": {"format": CHECKPOINT_FORMAT}}))
    assert str(verify_files(folder)) == "manifest.json is missing"
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing"):
        manifest_digest(folder)


def test_digests_of_format_2_are_verified(folder: Path) -> None:
    """Manifests of format 2 do not name their algorithm, SHA-256."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    entries = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    content = {"format": 2, "maxhydra": "0.1.0", "files": entries}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**content, "digest": digest}))
    # Runs have recorded this digest as the identity of their base weights.
    assert manifest_digest(folder) == digest and verify_files(folder) is None
    files[0].write_bytes(files[0].read_bytes()[::-1])
    assert "its sha256 digest differs" in str(verify_files(folder))


def test_an_unknown_algorithm(folder: Path) -> None:
    change(folder / MANIFEST, algorithm="crc7")
    assert str(verify_files(folder)) == "manifest.json names the unknown algorithm 'crc7'"


def test_files_hashed_during_the_save(folder: Path) -> None:
    """Early digests survive renames and are dropped for files that changed afterwards."""
    (folder / MANIFEST).unlink()
    hasher = EarlyHasher(folder, lambda name: "/d/" in name)
    try:
        while not all(hasher.find(folder / name) for name in ("params/d/weights", "rest/d/moments")):
            assert hasher.find(folder / "data/metadata") is None
    finally:
        hasher.stop()
    (folder / "rest/d/moments").write_bytes(b"written later")
    (folder / "params").rename(folder / "renamed")
    assert hasher.find(folder / "renamed/d/weights") is not None and hasher.find(folder / "rest/d/moments") is None
    write_manifest(folder, hasher)
    early = json.loads((folder / MANIFEST).read_text())["files"]
    write_manifest(folder)
    assert json.loads((folder / MANIFEST).read_text())["files"] == early and verify_files(folder) is None


def test_early_hashing_ends_with_the_folder(tmp_path: Path) -> None:
    """A save that fails deletes its folder and does not finalize it."""
    (tmp_path / "step").mkdir()
    hasher = EarlyHasher(tmp_path / "step", lambda name: True)
    (tmp_path / "step").rmdir()
    hasher._thread.join(timeout=240)
    assert not hasher._thread.is_alive()


def test_a_newer_format_names_the_version_to_install(folder: Path) -> None:
    change(folder / MANIFEST, format=99, maxhydra="7.1.0")
    with pytest.raises(NewerFormatError, match=r"has format 99, written by maxhydra 7\.1\.0.*install maxhydra 7\.1\.0"):
        verify_files(folder)


def test_migrations_run_in_order() -> None:
    steps = {1: lambda values: {**values, "name": "a"}, 3: lambda values: {**values, "name": values["name"] + "b"}}
    assert migrate_format({}, current=4, migrations=steps) == {"name": "ab"}
    assert migrate_format({"format": 3, "name": "c"}, current=4, migrations=steps)["name"] == "cb"
    for wrong in (0, -1, "2", None, True, 1.0):
        with pytest.raises(ValueError, match="is not a positive integer"):
            migrate_format({"format": wrong}, current=4, migrations={})


def test_no_jax_is_imported() -> None:
    code = "import sys, maxhydra.record.checkpoint_manifest; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
