"""Fingerprints of files: which changes they detect, how they describe them, and their limits."""

import os
from pathlib import Path

import pytest

from maxhydra.record import fingerprint
from maxhydra.record.fingerprint import describe_change, fingerprint_files


def write(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.jsonl").write_bytes(content)
    return sorted(folder.glob("*"))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write(tmp_path / "data", a=b"first\n" * 50, b=b"second\n" * 50)


@pytest.mark.parametrize(
    ("new_content", "description"),
    [
        (b"first\n" * 50 + b"third\n", "6 bytes were appended to a.jsonl"),
        (b"first\n" * 40, r"a.jsonl was replaced (300 bytes, now 240)"),
        (b"first\n" * 49 + b"tsrif\n", "a.jsonl was replaced by other content of the same size"),
        (b"other\n" * 60, r"a.jsonl was replaced (300 bytes, now 360)"),
    ],
)
def test_a_changed_file_is_described(files: list[Path], new_content: bytes, description: str) -> None:
    before = fingerprint_files(files)
    files[0].write_bytes(new_content)
    now = fingerprint_files(files, like=before)
    assert before["digest"] != now["digest"]
    text = describe_change(before, now, files)
    assert text == f"{description}; digest {before['digest'][:12]}, now {now['digest'][:12]}"


def test_added_and_removed_files_are_named(files: list[Path], tmp_path: Path) -> None:
    before = fingerprint_files(files)
    files[0].unlink()
    after = write(tmp_path / "data", c=b"third")
    assert describe_change(before, fingerprint_files(after), after).startswith(
        "a.jsonl was removed, c.jsonl was added;"
    )


def test_times_names_and_folders_do_not_matter(files: list[Path], tmp_path: Path) -> None:
    before = fingerprint_files(files)
    os.utime(files[0], (1, 1))
    assert fingerprint_files(files)["digest"] == before["digest"]
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    moved = [tmp_path / "elsewhere" / path.name for path in files]
    assert fingerprint_files(moved)["digest"] == before["digest"]
    assert [entry["name"] for entry in before["list"]] == ["a.jsonl", "b.jsonl"]


def test_large_files_are_sampled_and_an_appended_file_is_still_recognized(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "HASHED_BYTES", 64)
    before = fingerprint_files(files)
    assert before["sample"] == 32 and fingerprint_files(files, is_full=True)["sample"] is None
    with files[1].open("ab") as file:
        file.write(b"more")
    now = fingerprint_files(files, like=before)
    assert describe_change(before, now, files).startswith("4 bytes were appended to b.jsonl;")


def test_records_of_many_files_are_bounded(tmp_path: Path) -> None:
    paths = []
    for number in range(300):
        paths.append(tmp_path / f"{number:04}")
        paths[-1].write_bytes(bytes(number))
    found = fingerprint_files(paths)
    assert found["files"] == 300 and "list" not in found
    (tmp_path / "0100").write_bytes(bytes(99) + b"x")
    after = fingerprint_files(paths, like=found)
    assert describe_change(found, after, paths).startswith("300 files of 44850 bytes; digest")
    (tmp_path / "more").write_bytes(b"x")
    after = fingerprint_files([*paths, tmp_path / "more"], like=found)
    assert "300 files of 44850 bytes, now 301 files of 44851 bytes" in describe_change(found, after, paths)


def test_no_files(tmp_path: Path) -> None:
    assert fingerprint_files([])["files"] == 0
