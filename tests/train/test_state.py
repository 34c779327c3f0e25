"""Compiler options of the programs that create a state."""

import pytest

from maxhydra.train.state import _run_once_options

LEVEL = "--xla_backend_optimization_level"


@pytest.mark.parametrize(("flags", "level"), [("", 1), (f"{LEVEL}=3", 1), (f"{LEVEL}=2 {LEVEL}=0 --xla_dump_to=x", 0)])
def test_initialization_is_compiled_at_level_1_or_the_lower_one_of_xla_flags(
    flags: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert _run_once_options() == {"xla_backend_optimization_level": level}
