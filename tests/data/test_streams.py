"""Streams, stream sets and mixtures over records in memory: nothing lost or repeated, and any state resumes."""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Corpus, Data, OnError, Packing, PackingMethod
from maxhydra.data import pipeline as pipelines
from maxhydra.data import shuffle as shuffle
from maxhydra.data.loader import StreamSet
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.records import BadRecord, Cursor, Record
from maxhydra.data.rows import Row, RowSpec
from maxhydra.data.shuffle import IN_MEMORY, ShuffleOrder, share_of
from maxhydra.data.sources import RecordSource, Source, StreamSource
from maxhydra.data.stream import State, Stream, mixture_shares

SPEC = RowSpec(seq_len=16, vocab_size=100_000, seed=5)
RECORDS = 700
LENGTHS = np.random.default_rng(0).integers(2, 31, size=1000)


class Numbered:
    """Record i is a document of 2 to 30 tokens that starts with i; some cannot be read."""

    def __init__(self, count: int, *, first: int = 0, bad: Sequence[int] = (), groups: list[int] | None = None):
        self.count, self.first, self.bad, self.groups = count, first, set(bad), groups

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return [self._record(int(index)) for index in indices]

    def _record(self, index: int) -> Record | BadRecord:
        if index in self.bad:
            return BadRecord(self.location(index), "is bad")
        tokens = np.full(LENGTHS[index], 90_000 + self.first // 10_000, np.int32)
        tokens[0] = self.first + index
        return {"tokens": tokens}

    def location(self, index: int) -> str:
        return f"memory:{index}"


class Streamed:
    """The same records, readable only in order; share s of n gets every n-th record."""

    def __init__(self, count: int):
        self._records = Numbered(count)

    def iter_from(
        self, cursor: Cursor | None, *, share: int, shares: int
    ) -> Iterator[tuple[Record | BadRecord, Cursor]]:
        number = int(cursor["number"]) if cursor else 0
        while (index := number * shares + share) < len(self._records):
            number += 1
            yield self._records.read([index])[0], {"number": number, "note": f"after {index}"}

    def location(self, number: int) -> str:
        return f"stream:{number}"


OpenSource = Callable[[Corpus], Source]


@pytest.fixture
def use_source(monkeypatch: pytest.MonkeyPatch) -> Callable[[OpenSource], None]:
    """Make the pipeline open a source of the test."""

    def use(open_source: OpenSource) -> None:
        monkeypatch.setattr(pipelines, "open_source", lambda corpus, data, spec: open_source(corpus))

    return use


def make_data(**values: Any) -> Data:
    packing = values.pop("packing", Packing(window=4))
    return Data(source="grain", path="x", record_type="tokens", packing=packing, **values)


def open_streams(pipeline: Pipeline, streams: int, local_rows: Callable[[int], np.ndarray] = np.arange) -> StreamSet:
    def open_stream(share: int) -> Stream:
        return pipeline.stream(share=share, num_shares=streams)

    return StreamSet(open_stream, streams=streams, local_rows=local_rows)


def documents(rows: list[Row]) -> Counter[int]:
    """Count how often each record's first token starts a document in some rows."""
    return Counter(int(token) for row in rows for token in row["tokens"][row["tokens"] < 90_000] if token)


def all_documents(count: int, first: int = 0) -> set[int]:
    return set(range(max(first, 1), first + count))


def row_bytes(row: Row) -> bytes:
    return b"".join(row[name].tobytes() for name in sorted(row))


class TestOrder:
    @pytest.mark.parametrize("groups", [None, (3, 1, 40, 7, 9, 60, *[2] * 40)])
    def test_an_epoch_is_a_permutation_whatever_slices_are_read(self, groups: tuple[int, ...] | None) -> None:
        order = ShuffleOrder(200, 7, True, groups)
        epoch = order.indices(0, 0, 200)
        assert sorted(epoch) == list(range(200)) and list(epoch) != list(range(200))
        cuts = [0, 1, 50, 51, 130, 200]
        np.testing.assert_array_equal(
            np.concatenate([order.indices(0, a, b) for a, b in itertools.pairwise(cuts)]), epoch
        )
        assert (order.indices(1, 0, 200) != epoch).any()
        assert (ShuffleOrder(200, 8, True, groups).indices(0, 0, 200) != epoch).any()
        assert list(ShuffleOrder(200, 7, False, groups).indices(3, 5, 9)) == [5, 6, 7, 8]

    @pytest.mark.parametrize("groups", [None, (30,) * 10])
    def test_alternating_orders_are_each_computed_once(
        self, groups: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sources of a mixture alternate row by row."""
        calls, rng = Counter[int](), shuffle._rng
        monkeypatch.setattr(shuffle, "_rng", lambda *key: (calls.update([key[0]]), rng(*key))[1])
        orders = [ShuffleOrder(300, 1_000 + seed, True, groups) for seed in range(20)]
        for order in orders:
            order.indices(0, 5, 6)
        once = dict(calls)
        for order in orders:
            order.indices(0, 7, 8)
        assert len(once) == len(orders) and calls == once

    def test_more_records_than_fit_a_permutation_in_memory(self) -> None:
        order = ShuffleOrder(IN_MEMORY + 1, 7, True)
        some = order.indices(0, 1000, 1500)
        assert len(set(some)) == 500 and some.min() >= 0 and some.max() <= IN_MEMORY
        np.testing.assert_array_equal(order.indices(0, 1100, 1200), some[100:200])
        assert some.std() > IN_MEMORY / 5, "they come from everywhere"

    def test_grouped_records_stay_near_their_group(self) -> None:
        groups = (10,) * 100
        seen = ShuffleOrder(1000, 1, True, groups).indices(0, 0, 160) // 10
        assert len(set(seen)) == 16, "the first 160 records come from 16 groups"

    @pytest.mark.parametrize("shares", [1, 2, 3, 7])
    def test_shares_cover_all(self, shares: int) -> None:
        bounds = [share_of(100, share, shares) for share in range(shares)]
        assert [i for first, last in bounds for i in range(first, last)] == list(range(100))


class TestCoverage:
    @pytest.mark.parametrize("readers", [1, 2, 3, 4])
    @pytest.mark.parametrize("method", ["best_fit", "first_fit", "concat_then_split", "none"])
    def test_readers_cover_an_epoch_exactly_once(
        self, use_source: Callable[[OpenSource], None], readers: int, method: str
    ) -> None:
        use_source(lambda corpus: RecordSource(Numbered(RECORDS), Numbered(5)))
        data = make_data(packing=Packing(method=PackingMethod[method], window=4))
        pipeline = Pipeline(data, SPEC)
        rows: list[Row] = []
        for share in range(readers):
            stream = pipeline._stream("", "train", share=(share, readers), epochs=1, shuffle=True)
            with pytest.raises(StopIteration):
                while True:
                    rows.append(stream.take())
        pipeline.close()
        seen = documents(rows)
        assert set(seen) == all_documents(RECORDS) and set(seen.values()) == {1}
        lengths = sum(len(record["tokens"]) - 1 for record in Numbered(RECORDS).read(range(RECORDS)))  # type: ignore[arg-type]
        assert sum(int(row["weights"].sum()) for row in rows) == lengths

    @pytest.mark.parametrize("kind", ["records", "stream", "grouped"])
    def test_from_four_readers_to_two_within_an_epoch(
        self, use_source: Callable[[OpenSource], None], kind: str
    ) -> None:
        sources: dict[str, Source] = {
            "records": RecordSource(Numbered(RECORDS), Numbered(5)),
            "grouped": RecordSource(Numbered(RECORDS, groups=[20] * 35), Numbered(5)),
            "stream": StreamSource(Streamed(RECORDS), Streamed(5)),
        }
        use_source(lambda corpus: sources[kind])
        batch = 8

        def run(states: list[Any], readers: int, batches: int) -> tuple[list[list[Row]], list[Any]]:
            """Batches of a run on `readers` processes, and the merged states afterwards."""
            stream_sets = []
            for reader in range(readers):
                rows = np.arange(batch).reshape(readers, -1)[reader]
                stream_sets.append(open_streams(Pipeline(make_data(), SPEC), 4, lambda size, rows=rows: rows))
                stream_sets[-1].restore(states)
            taken = [[row for stream_set in stream_sets for row in stream_set.rows(batch, 0)] for _ in range(batches)]
            by_stream = zip(*(stream_set.states() for stream_set in stream_sets), strict=True)
            merged = [next((state for state in states if state is not None), None) for states in by_stream]
            for stream_set in stream_sets:
                stream_set.close()
            return taken, json.loads(json.dumps(merged))

        alone, _ = run([None] * 4, 1, 100)
        before, states = run([None] * 4, 4, 17)
        middle, states = run(states, 2, 9)
        after, _ = run(states, 1, 74)
        resumed = before + middle + after
        assert [list(map(row_bytes, rows)) for rows in resumed] == [list(map(row_bytes, rows)) for rows in alone]
        first_epoch = documents([row for rows in alone for row in rows])
        assert set(first_epoch) == all_documents(RECORDS), "every record came at least once"

    def test_three_processes_share_four_streams(self, use_source: Callable[[OpenSource], None]) -> None:
        """If a process boundary is within a stream, both processes read it and each takes its own rows."""
        use_source(lambda corpus: RecordSource(Numbered(RECORDS), Numbered(5)))
        alone = open_streams(Pipeline(make_data(), SPEC), 4)
        local_rows = np.arange(12).reshape(3, 4)
        thirds = [open_streams(Pipeline(make_data(), SPEC), 4, lambda size, rows=rows: rows) for rows in local_rows]
        for _ in range(20):
            expected = [row_bytes(row) for row in alone.rows(12, 0)]
            assert [row_bytes(row) for stream_set in thirds for row in stream_set.rows(12, 0)] == expected

    def test_a_batch_smaller_than_the_number_of_streams_uses_all_of_them(
        self, use_source: Callable[[OpenSource], None]
    ) -> None:
        use_source(lambda corpus: RecordSource(Numbered(RECORDS), Numbered(5)))
        processes = [
            open_streams(Pipeline(make_data(), SPEC), 4, lambda size, half=half: np.arange(size).reshape(2, -1)[half])
            for half in range(2)
        ]
        rows = [row for at in range(0, 900, 2) for stream_set in processes for row in stream_set.rows(2, at)]
        assert set(documents(rows)) == all_documents(RECORDS)
        # The batch grows: each process keeps two streams, at the position to which both have advanced them.
        alone = open_streams(Pipeline(make_data(), SPEC), 4)
        for at in range(0, 900, 2):
            alone.rows(2, at)
        expected = [row_bytes(row) for row in alone.rows(8, 900)]
        assert [row_bytes(row) for stream_set in processes for row in stream_set.rows(8, 900)] == expected
        assert [[state is None for state in stream_set.states()] for stream_set in processes] == [
            [False, False, True, True],
            [True, True, False, False],
        ]


class TestState:
    @pytest.mark.slow
    @pytest.mark.default_cases("best_fit-stream", "concat_then_split-grouped", "none-records")
    @pytest.mark.parametrize("kind", ["records", "stream", "grouped"])
    @pytest.mark.parametrize("method", ["best_fit", "concat_then_split", "none"])
    def test_resumes_from_a_state_saved_anywhere(
        self, use_source: Callable[[OpenSource], None], kind: str, method: str
    ) -> None:
        sources: dict[str, Source] = {
            "records": RecordSource(Numbered(150), Numbered(5)),
            "grouped": RecordSource(Numbered(150, groups=[10] * 15), Numbered(5)),
            "stream": StreamSource(Streamed(150), Streamed(5)),
        }
        use_source(lambda corpus: sources[kind])
        pipeline = Pipeline(make_data(packing=Packing(method=PackingMethod[method], window=3)), SPEC)
        reference = pipeline.stream(share=0, num_shares=1)
        states, rows = [], []
        for _ in range(700):
            states.append(json.loads(json.dumps(reference.state())))
            rows.append(row_bytes(reference.take()))
        assert states[-1]["cursor"]["epoch"] >= 2, "several epochs should pass"
        for position in [0, 1, *random.Random(0).sample(range(600), 40)]:
            fresh = pipeline.stream(share=0, num_shares=1)
            fresh.restore(states[position])
            assert fresh.state() == states[position]
            assert [row_bytes(fresh.take()) for _ in range(50)] == rows[position : position + 50]
            fresh.close()
        pipeline.close()

    def test_epochs_differ_and_are_counted(self, use_source: Callable[[OpenSource], None]) -> None:
        use_source(lambda corpus: RecordSource(Numbered(50), Numbered(5)))
        stream = Pipeline(make_data(packing=Packing(method=PackingMethod.none)), SPEC).stream(share=0, num_shares=1)
        first, second = ([row_bytes(stream.take()) for _ in range(62)] for _ in range(2))
        assert stream.stats.epoch >= 1
        assert first != second


@pytest.mark.parametrize("state", [{"given": 5}, {"given": {"big": 5}, "sources": {"big": {"given": 5}}}])
def test_the_position_of_other_data_is_rejected(state: State, use_source: Callable[[OpenSource], None]) -> None:
    use_source(lambda corpus: RecordSource(Numbered(RECORDS), Numbered(3)))
    stream_set = open_streams(Pipeline(make_data(), SPEC), 1)
    stream_set.restore([state])
    with pytest.raises(ConfigError, match="data: does not match the data position of the checkpoint"):
        stream_set.rows(2, 0)


class TestMixture:
    def data(self, **values: Any) -> Data:
        sources = {name: Corpus(source="grain", path="x", record_type="tokens") for name in ("big", "small")}
        return Data(source="mixture", sources=sources, packing=Packing(window=2), **values)

    def use(self, use_source: Callable[[OpenSource], None], data: Data) -> None:
        sizes = {id(data.sources["big"]): (900, 0), id(data.sources["small"]): (100, 10_000)}
        use_source(
            lambda corpus: RecordSource(
                Numbered(sizes[id(corpus)][0], first=sizes[id(corpus)][1]), Numbered(3, first=sizes[id(corpus)][1])
            )
        )

    def test_rows_come_in_their_shares_at_every_moment(self, use_source: Callable[[OpenSource], None]) -> None:
        data = self.data(weights={"big": 3, "small": 1})
        self.use(use_source, data)
        stream = Pipeline(data, SPEC).stream(share=0, num_shares=1)
        small = 0
        for count in range(1, 401):
            small += bool((stream.take()["tokens"] > 90_000).any())
            assert abs(small - count / 4) <= 1

    def test_temperature(self) -> None:
        sizes: dict[str, int | None] = {"big": 900, "small": 100}
        assert mixture_shares(self.data(), sizes) == {"big": 0.9, "small": 0.1}
        flat = mixture_shares(self.data(temperature=2.0), sizes)
        assert flat == pytest.approx({"big": 0.75, "small": 0.25})
        with pytest.raises(
            ConfigError, match=r"must be set, because data\.sources\.small is a stream of unknown length"
        ):
            mixture_shares(self.data(), {"big": 900, "small": None})

    def test_state(self, use_source: Callable[[OpenSource], None]) -> None:
        data = self.data(weights={"big": 0.4, "small": 0.6})
        self.use(use_source, data)
        pipeline = Pipeline(data, SPEC)
        reference = pipeline.stream(share=1, num_shares=2)
        states, rows = [], []
        for _ in range(300):
            states.append(json.loads(json.dumps(reference.state())))
            rows.append(row_bytes(reference.take()))
        for position in random.Random(1).sample(range(250), 20):
            fresh = pipeline.stream(share=1, num_shares=2)
            fresh.restore(states[position])
            assert [row_bytes(fresh.take()) for _ in range(50)] == rows[position : position + 50]
        pipeline.close()

    def test_changed_shares_apply_from_the_resumed_position(self, use_source: Callable[[OpenSource], None]) -> None:
        """A run that resumes with other weights does not make up for rows taken under the old ones."""
        before = self.data(weights={"big": 9, "small": 1})
        self.use(use_source, before)
        stream = Pipeline(before, SPEC).stream(share=0, num_shares=1)
        for _ in range(300):
            stream.take()
        after = self.data(weights={"big": 1, "small": 1})
        self.use(use_source, after)
        changed = Pipeline(after, SPEC).stream(share=0, num_shares=1)
        changed.restore(json.loads(json.dumps(stream.state())))
        taken = [changed.take() for _ in range(40)]
        assert sum(bool((row["tokens"] > 90_000).any()) for row in taken) == 20
        assert set(map(row_bytes, taken)) <= {row_bytes(stream.take()) for _ in range(300)}, (
            "each source resumes at its position"
        )

    def test_evaluation_takes_every_source_once(self, use_source: Callable[[OpenSource], None]) -> None:
        data = self.data(weights={"big": 1, "small": 9})
        self.use(use_source, data)
        rows = []
        for stream in Pipeline(data, SPEC).held_out():
            with pytest.raises(StopIteration):
                while True:
                    rows.append(stream.take())
        assert documents(rows) == Counter({1: 1, 2: 1, 10_000: 1, 10_001: 1, 10_002: 1})


class TestBadRecords:
    def test_raise_names_the_record(self, use_source: Callable[[OpenSource], None]) -> None:
        use_source(lambda corpus: RecordSource(Numbered(50, bad=[17]), Numbered(5)))
        stream = Pipeline(make_data(), SPEC).stream(share=0, num_shares=1)
        with pytest.raises(ConfigError, match=r"memory:17.*is bad") as error:
            for _ in range(50):
                stream.take()
        assert "data.on_error=skip" in str(error.value)

    def test_skip_counts_and_logs(
        self, use_source: Callable[[OpenSource], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        use_source(lambda corpus: RecordSource(Numbered(50, bad=[17, 33]), Numbered(5)))
        data = make_data(on_error=OnError.skip)
        stream = Pipeline(data, SPEC)._stream("", "train", share=(0, 1), epochs=1, shuffle=True)
        rows = []
        with caplog.at_level("WARNING", "maxhydra"), pytest.raises(StopIteration):
            while True:
                rows.append(stream.take())
        assert set(documents(rows)) == all_documents(50) - {17, 33}
        assert stream.stats.skipped == 2
        assert sorted(record.message for record in caplog.records) == [
            "skipped memory:17: is bad",
            "skipped memory:33: is bad",
        ]

    def test_nothing_usable_is_an_error_and_not_an_endless_loop(self, use_source: Callable[[OpenSource], None]) -> None:
        use_source(lambda corpus: RecordSource(Numbered(20, bad=range(20)), Numbered(5)))
        with pytest.raises(ConfigError, match="a whole epoch has no usable record"):
            Pipeline(make_data(on_error=OnError.skip), SPEC).stream(share=0, num_shares=1).take()

    def test_a_token_over_the_vocabulary(self, use_source: Callable[[OpenSource], None]) -> None:
        use_source(lambda corpus: RecordSource(Numbered(20), Numbered(5)))
        spec = RowSpec(seq_len=16, vocab_size=90_000, seed=0)
        with pytest.raises(ConfigError, match=r"model\.vocab_size=90000: is too small: the data has token id 90000"):
            Pipeline(make_data(), spec).stream(share=0, num_shares=1).take()

    def test_too_few_records_to_share(self, use_source: Callable[[OpenSource], None]) -> None:
        use_source(lambda corpus: RecordSource(Numbered(3), Numbered(5)))
        with pytest.raises(ConfigError, match="has 3 records, fewer than the 4 streams that read it"):
            Pipeline(make_data(), SPEC).stream(share=0, num_shares=4)


def test_weights_that_name_no_source_are_rejected(tmp_path: Path) -> None:
    sources = {"wiki": Corpus(source="synthetic"), "books": Corpus(source="demo")}
    data = Data(source="mixture", sources=sources, weights={"wikki": 1.0, "books": -1.0})
    problems = {problem.path: problem for problem in data.check()}
    assert problems["weights.wikki"].accepted == "wiki, books"
    assert problems["weights.wikki"].hint == "did you mean 'wiki'?"
    assert "not a positive number" in problems["weights.books"].reason
    assert "has no weight for wiki" in problems["weights"].reason
    for weight in (math.nan, math.inf, 0.0):
        data = Data(source="mixture", sources=sources, weights={"wiki": weight, "books": 1.0})
        assert [problem.path for problem in data.check()] == ["weights.wiki"]
