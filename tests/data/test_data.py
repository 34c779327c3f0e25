"""Tokenizer, row windows and sources against the text itself; order, position and sharding of the loader."""

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.data import Batch, BatchSpec, Loader, RowSpec, eval_batches, load_tokenizer, train_loader
from maxhydra.data.loader import StreamSet
from maxhydra.data.rows import ContiguousRows, Row
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.sources import RowSource, open_source
from maxhydra.data.sources.demo import TEXT
from maxhydra.data.sources.synthetic import NOISE, STEPS
from maxhydra.data.stream import RowStream
from maxhydra.sharding import Sharder, build_mesh
from tests.support.ports import free_address

SOURCES = ["demo", "synthetic", "text"]


def make_spec(batch: int = 4, seq_len: int = 8, devices: int = 1, **mesh: int) -> BatchSpec:
    made = build_mesh(Mesh(**(mesh or {"data": devices})), jax.devices()[:devices])
    sharding = Sharder(made, RULES).sharding(("act_batch", "act_length"))
    return BatchSpec(rows=RowSpec(seq_len=seq_len, vocab_size=259, seed=3), batch=batch, sharding=sharding)


def text_data(folder: Path, size: int, **values: object) -> Data:
    """A file without two equal windows."""
    path = folder / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(256, size=size, dtype=np.uint8).tobytes())
    return Data(source="text", path=str(path), **values)  # type: ignore[arg-type]


def open_rows(data: Data, spec: BatchSpec) -> RowSource:
    source = open_source(data, data, spec.rows)
    assert isinstance(source, RowSource)
    return source


def with_rows(spec: BatchSpec, **values: int) -> BatchSpec:
    return dataclasses.replace(spec, rows=dataclasses.replace(spec.rows, **values))


def host(batch: Batch) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in batch.items()}


def take(loader: Loader, count: int) -> list[dict[str, np.ndarray]]:
    return [host(next(loader)) for _ in range(count)]


def assert_same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


class TestTokenizer:
    @pytest.mark.parametrize("text", ["", "To be, or not to be", "naïve — 日本語 🎭", "\x00\n\t"])
    def test_round_trip(self, text: str) -> None:
        tokenizer = load_tokenizer(Data())
        ids = tokenizer.encode(text)
        assert ids == list(text.encode("utf-8"))
        assert tokenizer.decode(ids) == text
        np.testing.assert_array_equal(tokenizer.encode_bytes(text.encode()), ids)

    def test_special_tokens_have_no_text_and_bad_bytes_are_replaced(self) -> None:
        tokenizer = load_tokenizer(Data())
        assert tokenizer.decode([tokenizer.bos, 72, 105, tokenizer.eos, tokenizer.pad]) == "Hi"
        assert tokenizer.decode([72, 0xE6, 0x97]) == "H\ufffd"
        assert sorted([tokenizer.bos, tokenizer.eos, tokenizer.pad]) == [256, 257, 258]
        assert tokenizer.vocab_size == 259


class TestText:
    def test_the_file_matches_its_provenance(self) -> None:
        assert hashlib.sha256(TEXT.read_bytes()).hexdigest() in (TEXT.parent / "PROVENANCE.md").read_text()

    def test_held_out_text_is_from_one_play(self) -> None:
        text = TEXT.read_text(encoding="utf-8")
        assert 1_000_000 < len(text) < 2_500_000
        assert "gutenberg" not in text.lower()
        held_out = text[-round(len(text) * Data().eval_fraction) :]
        assert "by William Shakespeare" not in held_out
        assert "MACBETH" in held_out


class TestWindows:
    @pytest.mark.parametrize("length", [9, 16, 17, 18, 24, 25, 40])
    @pytest.mark.parametrize("seq_len", [1, 4, 8])
    def test_each_token_but_the_first_is_a_target_once(self, length: int, seq_len: int) -> None:
        tokens = np.arange(length, dtype=np.uint16)
        rows = ContiguousRows(tokens, seq_len, keep_partial=True)
        targets = np.concatenate([rows[i]["targets"][rows[i]["weights"] > 0] for i in range(len(rows))])
        inputs = np.concatenate([rows[i]["tokens"][rows[i]["weights"] > 0] for i in range(len(rows))])
        np.testing.assert_array_equal(targets, tokens[1:])
        np.testing.assert_array_equal(inputs, tokens[:-1])
        full = ContiguousRows(tokens, seq_len, keep_partial=False)
        assert len(full) == (length - 1) // seq_len
        assert all(full[i]["weights"].all() for i in range(len(full)))

    def test_a_row(self) -> None:
        row = ContiguousRows(np.array([5, 6, 7, 8, 9], np.uint16), 3, keep_partial=True)[1]
        assert {name: column.tolist() for name, column in row.items()} == {
            "tokens": [8, 0, 0],
            "targets": [9, 0, 0],
            "positions": [0, 1, 2],
            "weights": [1.0, 0.0, 0.0],
        }


class TestSources:
    @pytest.mark.parametrize("source", SOURCES)
    def test_rows(self, source: str, tmp_path: Path) -> None:
        data = text_data(tmp_path, 1000) if source == "text" else Data(source=source)
        spec = make_spec()
        opened = open_rows(data, spec)
        for rows in (opened.train, opened.evaluation):
            for index in (0, len(rows) // 2, len(rows) - 1):
                row, again = rows[index], open_rows(data, spec).train[index] if rows is opened.train else rows[index]
                has_bytes = rows is opened.evaluation and source in ("demo", "text")
                assert row.keys() == {"tokens", "targets", "positions", "weights"} | ({"bytes"} if has_bytes else set())
                for name, column in row.items():
                    assert column.shape == (spec.rows.seq_len,)
                    assert column.dtype == (np.float32 if name == "weights" else np.int32)
                    np.testing.assert_array_equal(column, again[name])
                assert row["tokens"].min() >= 0 and row["tokens"].max() < spec.rows.vocab_size

    def test_demo_trains_on_the_beginning(self) -> None:
        row = open_rows(Data(), make_spec(seq_len=64)).train[1]
        text = TEXT.read_text(encoding="utf-8")
        assert load_tokenizer(Data()).decode(row["tokens"].tolist()) == text[64:128]
        assert load_tokenizer(Data()).decode(row["targets"].tolist()) == text[65:129]

    def test_an_end_token_separates_files(self, tmp_path: Path) -> None:
        for name, text in {"b.txt": b"\xff\xfe", "a.txt": b"abc", "c.md": b"no"}.items():
            (tmp_path / name).write_bytes(text)
        data = Data(source="text", path=str(tmp_path), eval_fraction=0.2)
        opened = open_rows(data, make_spec(seq_len=2))
        assert opened.train[0]["tokens"].tolist() == [97, 98]
        assert opened.train[1]["tokens"].tolist() == [99, 257]
        assert opened.evaluation[0]["targets"].tolist() == [0xFE, 0]

    def test_changed_files_are_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        data = Data(source="text", path=str(path))
        for stamp, letter in ((1, "a"), (2, "b")):
            path.write_text(letter * 100)
            os.utime(path, (stamp, stamp))
            assert open_rows(data, make_spec()).train[0]["tokens"][0] == ord(letter)

    def test_synthetic_counts_with_noise(self) -> None:
        spec = make_spec(seq_len=4096)
        rows = open_rows(Data(source="synthetic"), spec).train
        steps = set()
        for index in range(16):
            tokens = rows[index]["tokens"]
            [(step, often)] = Counter((np.diff(tokens) % spec.rows.vocab_size).tolist()).most_common(1)
            steps.add(step)
            # A step is right if neither of its two tokens is noise.
            assert often / (spec.rows.seq_len - 1) == pytest.approx((1 - 1 / NOISE) ** 2, abs=0.03)
        assert steps <= set(range(1, STEPS + 1)) and len(steps) > 2
        other = open_rows(Data(source="synthetic"), with_rows(spec, seed=4)).train[0]["tokens"]
        assert (other != rows[0]["tokens"]).any()


class TestOrder:
    def epochs(self, data: Data, spec: BatchSpec, count: int, epoch: int) -> list[list[bytes]]:
        loader = train_loader(data, spec)
        rows = [row.tobytes() for batch in take(loader, count * epoch // spec.batch) for row in batch["tokens"]]
        loader.close()
        return [rows[i : i + epoch] for i in range(0, len(rows), epoch)]

    def test_an_epoch_holds_each_window_once_in_a_new_order(self, tmp_path: Path) -> None:
        spec = make_spec(batch=4, seq_len=8)
        data = text_data(tmp_path, 200)
        rows = open_rows(data, spec).train
        windows = sorted(rows[i]["tokens"].tobytes() for i in range(len(rows)))
        assert len(rows) % spec.batch, "a batch should cross the edge of the epoch"
        first, second, *_ = self.epochs(data, spec, 4, len(rows))
        assert sorted(first) == sorted(second) == windows
        assert first != second

    def test_without_shuffle_the_order_is_the_text(self, tmp_path: Path) -> None:
        spec = make_spec(batch=3, seq_len=8)
        data = text_data(tmp_path, 200, shuffle=False)
        rows = open_rows(data, spec).train
        for epoch in self.epochs(data, spec, 3, len(rows)):
            assert epoch == [rows[i]["tokens"].tobytes() for i in range(len(rows))]

    def test_the_order_follows_the_seed_and_not_the_batch(self, tmp_path: Path) -> None:
        data = text_data(tmp_path, 400)
        spec = make_spec(batch=4)

        def first_rows(spec: BatchSpec) -> np.ndarray:
            loader = train_loader(data, spec)
            batches = take(loader, 24 // spec.batch)
            loader.close()
            return np.concatenate([batch["tokens"] for batch in batches])

        np.testing.assert_array_equal(first_rows(spec), first_rows(dataclasses.replace(spec, batch=6)))
        assert (first_rows(spec) != first_rows(with_rows(spec, seed=2**40))).any()

    def test_overfitting_repeats_the_first_batches_and_evaluates_them(self, tmp_path: Path) -> None:
        data = text_data(tmp_path, 400, overfit_batches=2)
        spec = make_spec(batch=4)
        rows = open_rows(data, spec).train
        expected = sorted(rows[i]["tokens"].tobytes() for i in range(8))
        for epoch in self.epochs(data, spec, 3, 8):
            assert sorted(epoch) == expected
        evaluated = [row.tobytes() for batch in eval_batches(data, spec) for row in np.asarray(batch["tokens"])]
        assert sorted(evaluated) == expected

    def test_too_little_text(self, tmp_path: Path) -> None:
        spec = make_spec(batch=4, seq_len=8)
        with pytest.raises(
            ConfigError, match=r"has only 3 training sequences of train\.seq_len=8, but a batch needs 4"
        ):
            train_loader(text_data(tmp_path, 30), spec)
        with pytest.raises(ConfigError) as error:
            train_loader(text_data(tmp_path, 200, overfit_batches=9), spec)
        assert error.value.problems[0].path == "data.overfit_batches"
        assert error.value.problems[0].accepted == "1 to 5"
        for size in (0, 1):
            with pytest.raises(ConfigError, match="has only 0 training sequences"):
                train_loader(text_data(tmp_path, size), spec)
            assert list(eval_batches(text_data(tmp_path, size), spec)) == []

    def test_a_vocabulary_over_the_model(self) -> None:
        with pytest.raises(ConfigError) as error:
            train_loader(Data(), with_rows(make_spec(), vocab_size=256))
        assert error.value.problems[0].path == "model.vocab_size"
        assert error.value.problems[0].accepted == "259 or more"


@pytest.mark.parametrize("size", [200, 1000, 1003])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_evaluation_predicts_each_held_out_byte_once(tmp_path: Path, size: int, prefetch: int) -> None:
    data = text_data(tmp_path, size, eval_fraction=0.1, prefetch=prefetch)
    batches = [host(batch) for batch in eval_batches(data, make_spec(batch=3, seq_len=8))]
    assert data.path is not None
    content = Path(data.path).read_bytes()
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    inputs = np.concatenate([batch["tokens"][batch["weights"] > 0] for batch in batches])
    held_out = round(size * 0.1)
    assert bytes(targets.astype(np.uint8)) == content[-held_out:]
    assert bytes(inputs.astype(np.uint8)) == content[-held_out - 1 : -1]
    assert all(batch["tokens"].shape == (3, 8) for batch in batches)


class Numbers:
    """Row i holds the number i; one row cannot be read."""

    def __init__(self, fails_at: int = -1):
        self.fails_at, self.read = fails_at, 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Row:
        if index == self.fails_at:
            raise OSError("disk gone")
        self.read += 1
        return {"tokens": np.array([index]), "weights": np.ones(1)}

    def loader(self, batch: int, prefetch: int) -> Loader[list[int]]:
        order = ShuffleOrder(len(self), seed=0, shuffle=False)
        return Loader(
            lambda streams: StreamSet(
                lambda share: RowStream(self, order, share=share, shares=streams, epochs=None),
                streams=streams,
                local_rows=np.arange,
            ),
            lambda rows, size: [int(row["tokens"][0]) for row in rows],
            batch_size=lambda sequences: batch,
            streams=1,
            prefetch=prefetch,
            close=lambda: None,
        )


class TestPosition:
    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_a_fresh_loader_resumes_from_a_state_saved_anywhere(self, tmp_path: Path, prefetch: int) -> None:
        spec = make_spec(batch=4)
        data = text_data(tmp_path, 200, prefetch=prefetch)
        reference = train_loader(data, spec)
        states, batches = [reference.state()], []
        for _ in range(24):
            batches.append(host(next(reference)))
            states.append(reference.state())
        reference.close()
        assert len(open_rows(data, spec).train) < 24, "several epochs should pass"
        for position in random.Random(0).sample(range(24), 8):
            fresh = train_loader(data, spec)
            take(fresh, position % 3)
            fresh.restore(json.loads(json.dumps(states[position])))
            assert fresh.state() == states[position]
            assert_same(take(fresh, 24 - position), batches[position:])
            fresh.close()

    def test_prefetched_batches_do_not_count(self) -> None:
        numbers = Numbers()
        loader = numbers.loader(batch=2, prefetch=3)
        assert loader.state() == {"sequences": 0, "streams": [None]}
        next(loader)
        assert loader.state() == {"sequences": 2, "streams": [{"given": 2}]}
        loader.close()
        assert numbers.read >= 2

    def test_an_error_in_the_thread_is_raised_by_next(self) -> None:
        numbers = Numbers(fails_at=5)
        loader = numbers.loader(batch=2, prefetch=2)
        assert [next(loader), next(loader)] == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="disk gone"):
            next(loader)
        assert loader.state()["sequences"] == 4
        numbers.fails_at = -1
        assert next(loader) == [4, 5]
        loader.close()

    def test_close_stops_the_thread(self) -> None:
        before = set(threading.enumerate())
        loader = train_loader(Data(), make_spec())
        next(loader)
        assert set(threading.enumerate()) - before
        loader.close()
        assert not set(threading.enumerate()) - before

    def test_leaving_an_evaluation_early_stops_its_thread(self) -> None:
        before = set(threading.enumerate())
        batches = eval_batches(Data(), make_spec())
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert not set(threading.enumerate()) - before


class TestMesh:
    @pytest.mark.parametrize(
        "mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "sequence": 4}, {"tensor": 8}]
    )
    def test_the_batch_is_the_same_on_every_mesh(self, mesh: dict[str, int]) -> None:
        data = Data()
        alone, spread = train_loader(data, make_spec(batch=8)), train_loader(data, make_spec(8, devices=8, **mesh))
        batch = next(spread)
        sharding = make_spec(8, devices=8, **mesh).sharding
        assert all(array.sharding.is_equivalent_to(sharding, 2) for array in batch.values())
        assert_same([host(batch)], take(alone, 1))
        alone.close()
        spread.close()


PROGRAM = """
import json, sys
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.config.schema.hardware import Mesh, RULES
from maxhydra.runtime import start
start(Hardware(platform=Platform.cpu, simulated_devices=2, compilation_cache=None))
from maxhydra.data import BatchSpec, RowSpec, train_loader
from maxhydra.sharding import Sharder, build_mesh
seen = []
for mesh in json.loads(sys.argv[1]):
    sharder = Sharder(build_mesh(Mesh(**mesh)), RULES)
    sharding = sharder.sharding(("act_batch", "act_length"))
    spec = BatchSpec(rows=RowSpec(seq_len=8, vocab_size=259, seed=3), batch=8, sharding=sharding)
    loader = train_loader(Data(), spec)
    next(loader)
    tokens = next(loader)["tokens"]
    shards = [[[i.indices(8)[:2] for i in shard.index], shard.data.tolist()] for shard in tokens.addressable_shards]
    seen.append([spec.local_rows(8).tolist(), shards, loader.state()])
    loader.close()
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_processes_read_their_own_rows_of_the_same_batch() -> None:
    halves, all_rows = [[0, 1, 2, 3], [4, 5, 6, 7]], [list(range(8))] * 2
    meshes = [({"data": 4}, halves), ({"data": 2, "sequence": 2}, halves), ({"sequence": 2, "tensor": 2}, all_rows)]
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    clean |= {"PYTHONPATH": os.pathsep.join([str(TEXT.parents[3]), *sys.path])}
    clean |= {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([mesh for mesh, _ in meshes])],
            env=clean | {"JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    seen = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        seen.append(json.loads(out))
    alone = train_loader(Data(), make_spec(batch=8))
    expected = take(alone, 2)[1]["tokens"]
    alone.close()
    for (_, expected_rows), *both in zip(meshes, *seen, strict=True):
        combined = np.full((8, 8), -1)
        for expected_local, (rows, shards, state) in zip(expected_rows, both, strict=True):
            assert rows == expected_local
            assert state == alone.state()
            for ((top, bottom), (left, right)), values in shards:
                combined[top:bottom, left:right] = values
        np.testing.assert_array_equal(combined, expected)
