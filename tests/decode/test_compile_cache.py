"""CompileCache: which program substitutes for one that is being compiled, and for how long."""

from threading import Event
from typing import NamedTuple

import pytest

from maxhydra.decode import compile_cache
from maxhydra.decode.compile_cache import MAX_WASTED_STEPS, CompileCache


class Rows(NamedTuple):
    """Key of a program for a number of rows."""

    rows: int

    def covers(self, other: "Rows") -> bool:
        return self.rows >= other.rows

    @property
    def size(self) -> int:
        return self.rows

    @property
    def num_steps(self) -> int:
        return 1


def test_the_count_is_stable_once_all_programs_exist():
    programs = CompileCache(lambda key: key, deterministic=False)
    programs.get(Rows(8))
    before = programs.wait_for_compiles()
    assert programs.choose(Rows(8), eventual=Rows(8)) == Rows(8)
    assert programs.wait_for_compiles() == before
    assert programs.choose(Rows(4), eventual=Rows(4)) == Rows(8)
    assert programs.wait_for_compiles() > before
    programs.close()


def test_the_exact_program_replaces_a_larger_one():
    programs = CompileCache(lambda key: key, deterministic=False)
    programs.get(Rows(8))
    uses = [programs.choose(Rows(4), eventual=Rows(4)) for _ in range(MAX_WASTED_STEPS + 1)]
    assert set(uses) == {Rows(8)}
    before = programs.wait_for_compiles()
    assert programs.choose(Rows(4), eventual=Rows(4)) == Rows(4)
    assert programs.wait_for_compiles() == before
    programs.close()


def test_settled_waits_for_running_compilations():
    may_compile, done = Event(), []

    def compile(key: Rows) -> str:
        may_compile.wait(30)
        done.append(key)
        return "program"

    programs = CompileCache(compile, deterministic=True)
    programs.start(Rows(2))
    assert not done
    may_compile.set()
    assert programs.wait_for_compiles() == 1
    assert done == [Rows(2)]
    programs.close()


def test_an_assembler_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "RETRY_SECONDS", 0)
    failures = ["INVALID_ARGUMENT", "INTERNAL: Failed to launch ptxas", "INTERNAL: Failed to launch ptxas"]

    def compile(key: Rows) -> Rows:
        if len(failures) > 1 or key == Rows(2):
            raise RuntimeError(failures.pop())
        return key

    programs = CompileCache(compile, deterministic=False)
    assert programs.get(Rows(1)) == Rows(1)
    with pytest.raises(RuntimeError, match="INVALID"):
        programs.get(Rows(2))
