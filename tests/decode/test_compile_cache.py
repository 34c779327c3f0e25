"""Which program does the work while the right one is being compiled, and when that is over."""

from threading import Event
from typing import NamedTuple

from maxhydra.decode.compile_cache import PATIENCE, CompileCache


class Rows(NamedTuple):
    """A program for so many rows."""

    rows: int

    def holds(self, other: "Rows") -> bool:
        return self.rows >= other.rows

    @property
    def size(self) -> int:
        return self.rows

    @property
    def length(self) -> int:
        return 1


def test_work_with_all_its_programs_changes_nothing_any_more():
    programs = CompileCache(lambda name: name, steady=False)
    programs.get(Rows(8))
    before = programs.settled()
    assert programs.choose(Rows(8), eventual=Rows(8)) == Rows(8)
    assert programs.settled() == before
    assert programs.choose(Rows(4), eventual=Rows(4)) == Rows(8)
    assert programs.settled() > before
    programs.close()


def test_a_program_that_is_too_large_gives_way_to_the_right_one():
    programs = CompileCache(lambda name: name, steady=False)
    programs.get(Rows(8))
    uses = [programs.choose(Rows(4), eventual=Rows(4)) for _ in range(PATIENCE + 1)]
    assert set(uses) == {Rows(8)}
    before = programs.settled()
    assert programs.choose(Rows(4), eventual=Rows(4)) == Rows(4)
    assert programs.settled() == before
    programs.close()


def test_settled_waits_for_what_is_being_compiled():
    go, done = Event(), []

    def compile(name: Rows) -> str:
        go.wait(30)
        done.append(name)
        return "program"

    programs = CompileCache(compile, steady=True)
    programs.begin(Rows(2))
    assert not done
    go.set()
    assert programs.settled() == 1
    assert done == [Rows(2)]
    programs.close()
