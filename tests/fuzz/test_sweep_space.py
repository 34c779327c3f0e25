"""Sweep expressions on the command line: every one gives a distribution that can be sampled, or one message."""

import math

import pytest
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.sweep.search import distributions, grid_values
from tests.support.fuzzing import fuzz

NUMBERS = st.one_of(
    st.integers(-3, 50).map(str),
    st.integers().map(str),
    st.floats(width=64).map(repr),
    st.sampled_from(["1e-5", "1e400", "-inf", "nan", "0x10", "1_000", "null", "true", "''", "a"]),
)
WORDS = st.text(st.sampled_from("abz01,.()[]{}=:'\"\\$ -+~@/*\n\0é"), max_size=12)


def call(names: list[str], arguments: st.SearchStrategy[list[str]]) -> st.SearchStrategy[str]:
    """Expressions such as range(1,9,2)."""
    return st.builds(lambda name, given: f"{name}({','.join(given)})", st.sampled_from(names), arguments)


LISTS = st.lists(NUMBERS | WORDS, max_size=6)
LEAVES = st.one_of(NUMBERS, WORDS, LISTS.map(",".join), call(["range", "interval", "choice", "shuffle"], LISTS))
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: call(
        ["tag", "int", "float", "sort", "shuffle", "extend_list"], st.lists(inner | st.just("log"), max_size=3)
    ),
    max_leaves=3,
)


@pytest.mark.slow
@fuzz(cases=150, expression=EXPRESSIONS, grid=st.booleans())
@example("range(0,1e400)", True)
@example("range(0,10,1e-300)", True)
@example("range(1000000000000)", True)
@example("interval(nan,1)", False)
@example("tag(log,interval(1e-320,1e308))", False)
def test_expression(expression, grid):
    result = distributions({"optimizer.learning_rate": expression}, grid=grid)
    for distribution in result.values():
        if grid:
            values = grid_values(distribution)
            assert 0 < len(values) <= 10**6
            numbers = [value for value in values if isinstance(value, float)]
            assert all(map(math.isfinite, numbers))
