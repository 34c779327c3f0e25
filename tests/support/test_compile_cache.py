import os
from pathlib import Path

import pytest
import zstandard

from tests.support import compile_cache

PROGRAM = zstandard.compress(b"a compiled program" * 1000)


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = tmp_path / "session"
    folder.mkdir()
    (folder / "jit_step-1-cache").write_bytes(PROGRAM)
    return folder


def test_later_sessions_start_with_complete_entries(session: Path, tmp_path: Path) -> None:
    for name, content in {"cut": PROGRAM[:-1], "begun": PROGRAM[:10], "empty": b"", "other": b"no frame"}.items():
        (session / f"{name}-cache").write_bytes(content)
    compile_cache.save_store(session, tmp_path / "store")
    later = tmp_path / "later"
    later.mkdir()
    compile_cache.load_store(later, tmp_path / "store")
    assert [entry.name for entry in later.iterdir()] == ["jit_step-1-cache"]
    assert (later / "jit_step-1-cache").read_bytes() == PROGRAM


def test_old_entries_are_removed(session: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    compile_cache.save_store(session, store)
    (entry,) = store.iterdir()
    os.utime(entry, (0, 0))
    compile_cache.load_store(session, store)
    assert not list(store.iterdir())
