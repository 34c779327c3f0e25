from pathlib import Path

import pytest
from jax._src import compilation_cache

from maxhydra.runtime.program_cache import write_programs_atomically

KEY, PROGRAM = "jit_step-123", b"program" * 100


def make_cache(folder: Path) -> compilation_cache.CacheInterface:
    write_programs_atomically()
    found = compilation_cache.get_file_cache(str(folder))
    assert found is not None
    return found[0]


def test_a_truncated_entry_is_replaced(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    (tmp_path / f"{KEY}-cache").write_bytes(PROGRAM[:50])
    cache.put(KEY, PROGRAM)
    assert cache.get(KEY) == PROGRAM and len(list(tmp_path.iterdir())) == 1


def test_an_unfinished_write_is_not_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(tmp_path)

    def replace(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "rename", replace)
    monkeypatch.setattr(type(tmp_path), "replace", replace)
    monkeypatch.setattr("os.replace", replace)
    monkeypatch.setattr("os.rename", replace)
    with pytest.raises(KeyboardInterrupt):
        cache.put(KEY, PROGRAM)
    assert cache.get(KEY) is None
