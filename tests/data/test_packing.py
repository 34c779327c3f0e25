"""Packing against the documents themselves: every token once, in rows that mark where each document starts."""

import dataclasses
from functools import cached_property
from itertools import pairwise

import numpy as np
import pytest

from maxhydra.config.schema.data import Overlong, Packing, PackingMethod
from maxhydra.data.packing import PackingPlan, plan_rows
from maxhydra.data.rows import Document, PackedRows, pack_rows

METHODS = [method for method in PackingMethod if method is not PackingMethod.auto]
FITS = [PackingMethod.first_fit, PackingMethod.best_fit]


@dataclasses.dataclass(frozen=True)
class Case:
    """Random documents with unique tokens, so that every position can be traced to its document."""

    documents: list[Document]
    capacity: int
    packing: Packing

    @property
    def lengths(self) -> np.ndarray:
        return np.array([document.num_targets for document in self.documents], np.int64)

    @cached_property
    def plan(self) -> PackingPlan:
        return plan_rows(self.lengths, self.capacity, self.packing)

    @cached_property
    def rows(self) -> PackedRows:
        return pack_rows(self.documents, self.plan, self.capacity, with_segments=True)

    @property
    def splits(self) -> bool:
        concat = self.packing.method is PackingMethod.concat_then_split
        return concat or self.packing.overlong is Overlong.split


def make_case(seed: int, method: PackingMethod) -> Case:
    random = np.random.default_rng((seed, METHODS.index(method)))
    capacity = int(random.choice([1, 2, 7, 16, 33]))
    sizes = random.integers(0, int(random.choice([2, 3, capacity + 2, 4 * capacity])) + 1, int(random.integers(0, 60)))
    documents, after = [], 1
    for size in sizes.tolist():
        tokens = np.arange(after, after + size, dtype=random.choice(["<u2", "<i4", "<i8"]))
        after += size
        weights = None if random.random() < 0.3 else random.random(size).astype(np.float32)
        # A column that identifies the token it is aligned with.
        columns = {"aligned": np.stack([tokens[:-1], -tokens[:-1].astype(np.int64)], 1).astype(np.float32)}
        documents.append(Document(tokens, weights, columns))
    packing = Packing(
        method=method,
        max_segments=None if random.random() < 0.4 else int(random.integers(1, 6)),
        overlong=random.choice(list(Overlong)),
    )
    return Case(documents, capacity, packing)


CASES = [make_case(seed, method) for seed in range(25) for method in METHODS]


def ids(case: Case) -> str:
    return f"{case.packing.method.name}-{case.packing.overlong.name}-{case.packing.max_segments}-{case.capacity}"


def filled_pairs(case: Case, row: int) -> list[tuple[int, int]]:
    """(token, target) pairs of the filled positions of a row."""
    columns = case.rows[row]
    filled = case.rows.num_filled(row)
    return list(zip(columns["tokens"][:filled].tolist(), columns["targets"][:filled].tolist(), strict=True))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_every_token_is_in_one_row_and_lost_documents_are_counted(case: Case) -> None:
    expected, cut = [], 0
    for document in case.documents:
        pairs = list(pairwise(document.tokens.tolist()))
        if len(pairs) > case.capacity and not case.splits:
            cut += 1
            pairs = pairs[: case.capacity] if case.packing.overlong is Overlong.truncate else []
        expected += pairs
    rows = case.rows
    seen = [pair for row in range(len(rows)) for pair in filled_pairs(case, row)]
    assert sorted(seen) == expected
    assert rows.cut == case.plan.cut == cut


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_row_marks_where_each_document_starts(case: Case) -> None:
    rows = case.rows
    limit = 1 if case.packing.method is PackingMethod.none else case.packing.max_segments or case.capacity
    for index in range(len(rows)):
        row, filled = rows[index], rows.num_filled(index)
        assert 0 < filled <= case.capacity
        for name, column in row.items():
            assert len(column) == case.capacity
            assert not column[filled:].any(), f"{name} in the padding"
        tokens, segments = row["tokens"][:filled], row["segments"][:filled]
        # Each piece has its own segment; within one, tokens are consecutive and positions count from 0.
        starts = np.flatnonzero(np.diff(segments, prepend=0))
        assert segments[starts].tolist() == list(range(1, len(starts) + 1)) and len(starts) <= limit
        for first, last in pairwise([*starts.tolist(), filled]):
            assert row["positions"][first:last].tolist() == list(range(last - first))
            assert (np.diff(tokens[first:last]) == 1).all()
            assert row["targets"][first:last].tolist() == (tokens[first:last] + 1).tolist()
        np.testing.assert_array_equal(row["aligned"][:filled, 0], tokens)
        np.testing.assert_array_equal(row["aligned"][:filled, 1], -tokens)
        assert [row[name].dtype for name in ("tokens", "targets", "positions", "weights", "segments")] == [
            np.int32,
            np.int32,
            np.int32,
            np.float32,
            np.int32,
        ]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_weights_are_those_of_the_targets(case: Case) -> None:
    weight_of: dict[int, float] = {}
    for document in case.documents:
        weights = np.ones(len(document.tokens), np.float32) if document.weights is None else document.weights
        weight_of |= dict(zip(document.tokens.tolist(), weights.tolist(), strict=True))
    rows = case.rows
    for index in range(len(rows)):
        filled = rows.num_filled(index)
        expected = [weight_of[token] for token in rows[index]["targets"][:filled].tolist()]
        assert rows[index]["weights"][:filled].tolist() == expected


@pytest.mark.parametrize("case", [case for case in CASES if case.packing.method in FITS], ids=ids)
def test_a_document_that_fits_is_never_split(case: Case) -> None:
    pieces = np.bincount(case.plan.document, minlength=len(case.documents))
    whole = case.lengths <= case.capacity
    assert (pieces[whole] == (case.lengths[whole] > 0)).all()
    if case.splits:
        assert (pieces[~whole] == -(-case.lengths[~whole] // case.capacity)).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.packing.max_segments is None], ids=ids)
def test_no_two_rows_could_be_one(case: Case) -> None:
    """First fit and best fit leave at most one row half empty; concatenation fills all rows but the last."""
    filled = np.sort(case.rows.filled)
    if case.packing.method is PackingMethod.concat_then_split:
        assert (filled[1:] == case.capacity).all()
        assert len(filled) == -(-int(case.lengths.sum()) // case.capacity)
    elif case.packing.method in FITS and len(filled) > 1:
        assert filled[0] + filled[1] > case.capacity


def test_first_fit_takes_the_first_row_and_best_fit_the_fullest() -> None:
    lengths = np.array([6, 7, 3, 4, 2, 5])
    first = plan_rows(lengths, 10, Packing(method=PackingMethod.first_fit))
    assert _rows_of(first) == [[0, 2], [1, 4], [3, 5]]
    # Longest first: 7, 6, then 5 opens a row, 4 joins 6, 3 joins 7, 2 joins 5.
    best = plan_rows(lengths, 10, Packing(method=PackingMethod.best_fit))
    assert _rows_of(best) == [[1, 2], [0, 3], [4, 5]]
    assert _rows_of(plan_rows(lengths, 10, Packing())) == _rows_of(best)


def test_concatenation_continues_in_the_next_row() -> None:
    made = plan_rows(np.array([3, 9]), 4, Packing(method=PackingMethod.concat_then_split))
    assert list(zip(made.document.tolist(), made.start.tolist(), made.count.tolist(), strict=True)) == [
        (0, 0, 3),
        (1, 0, 1),
        (1, 1, 4),
        (1, 5, 4),
    ]


def _rows_of(made: PackingPlan) -> list[list[int]]:
    return [made.document[made.row == row].tolist() for row in range(made.rows)]


@pytest.mark.parametrize("method", METHODS)
def test_documents_of_one_token_or_none_fill_no_position(method: PackingMethod) -> None:
    empty = [Document(np.empty(0, np.int32)), Document(np.array([5], np.int32))]
    lengths = np.array([document.num_targets for document in empty])
    assert lengths.tolist() == [0, 0]
    made = plan_rows(lengths, 8, Packing(method=method))
    assert made.rows == 0 and len(pack_rows(empty, made, 8, with_segments=True)) == 0
    assert len(pack_rows([], plan_rows(np.empty(0, np.int64), 8, Packing(method=method)), 8, with_segments=True)) == 0


def test_best_fit_depends_on_the_lengths_alone() -> None:
    """Whatever the order of the documents, the rows hold the same lengths."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 100, 200)
    packing = Packing(method=PackingMethod.best_fit)

    def lengths_by_row(lengths: np.ndarray) -> list[list[int]]:
        made = plan_rows(lengths, 64, packing)
        return sorted(sorted(made.count[made.row == row].tolist()) for row in range(made.rows))

    expected = lengths_by_row(lengths)
    for _ in range(5):
        assert lengths_by_row(random.permutation(lengths)) == expected


def test_reordering_rows_reorders_their_fill() -> None:
    case = make_case(3, PackingMethod.first_fit)
    rows = case.rows
    order = np.random.default_rng(0).permutation(len(rows))
    moved = rows.reorder(order).reorder(np.arange(len(rows))[::-1])
    for at, index in enumerate(order[::-1].tolist()):
        assert moved.num_filled(at) == rows.num_filled(index)
        for name in rows.arrays:
            np.testing.assert_array_equal(moved[at][name], rows[index][name])


def test_best_fit_fills_over_98_percent_of_lognormal_documents() -> None:
    """Mean 600, sigma 1, sequences of 4096, the default window."""
    random = np.random.default_rng(0)
    packing = Packing(method=PackingMethod.best_fit)
    capacity = filled = 0
    for _ in range(20):
        lengths = np.maximum(1, random.lognormal(np.log(600) - 0.5, 1.0, packing.window * 4096 // 600)).astype(np.int64)
        made = plan_rows(lengths, 4096, packing)
        capacity += made.rows * 4096
        filled += int(made.count.sum())
        assert int(made.count.sum()) == int(lengths.sum())
    assert filled / capacity > 0.98
