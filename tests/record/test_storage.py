"""Object stores: requests that fail, runs mirrored between hosts, checkpoints in two tiers, and a cache of inputs."""

import json
import logging
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxhydra.record import RunDirectory, RunInUseError, mirror, storage
from maxhydra.record.checkpoint_manifest import MANIFEST, verify_files
from maxhydra.record.checkpoint_tiers import PINNED, CheckpointTiers, Retention, best_steps
from maxhydra.record.mirror import LEASE, Lease, LeaseLostError, Mirror
from maxhydra.record.storage import StorageError, Store, fetch, unsupported_reason
from tests.support.object_store import FlakyFileSystem, flaky_store, write_checkpoint
from tests.support.polling import wait_for

ALL = Retention(keep=3, keep_best=0, best_metric="eval/loss", persist_every=None)
URL = "flaky://bucket/runs/first"


@pytest.fixture(autouse=True)
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyFileSystem]]:
    """An empty store and an empty cache. Failed requests are repeated at once."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(storage, "FIRST_DELAY", 0.0)
    monkeypatch.setattr(mirror, "INTERVAL", 0.02)
    monkeypatch.setattr(mirror, "CHECKPOINT_INTERVAL", 0.02)
    fetch.cache_clear()
    with flaky_store() as system:
        yield system


def fail(flaky: type[FlakyFileSystem], times: int, *, operation: str, path: str = "") -> list[str]:
    """Make the next requests of a kind fail; returns the list to which their paths are added."""
    failed: list[str] = []

    def before(found: str, name: str) -> None:
        if found == operation and path in name and len(failed) < times:
            failed.append(name)
            raise OSError("injected")

    flaky.before = staticmethod(before)
    return failed


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("foo://bucket/x", "unknown scheme"),
        ("gs://bucket/x", "gcsfs"),
        ("s3://key:secret@bucket/x", "credentials"),
        ("s3://bucket/../x", r"\.\."),
    ],
)
def test_unsupported_urls_are_named_without_a_request(url: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = storage.importlib.util.find_spec
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None if name == "gcsfs" else find_spec(name))
    problem = unsupported_reason(url)
    assert problem is not None
    with pytest.raises(StorageError, match=reason):
        Store(url)
    assert unsupported_reason("memory://bucket/x") is None


class TestStore:
    def test_failed_requests_are_repeated(self, flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
        store = Store(URL)
        failed = fail(flaky, 3, operation="write")
        store.write("a", b"1")
        assert len(failed) == 3 and store.read("a") == b"1"
        failed = fail(flaky, 3, operation="read")
        store.download("a", tmp_path / "a")
        assert len(failed) == 3 and (tmp_path / "a").read_bytes() == b"1"

    def test_a_lasting_failure_names_url_operation_and_cause(self, flaky: type[FlakyFileSystem]) -> None:
        failed = fail(flaky, 100, operation="write")
        with pytest.raises(StorageError, match=rf"cannot write {URL}/a: OSError: injected"):
            Store(URL).write("a", b"1")
        assert len(failed) == storage.ATTEMPTS

    def test_a_failed_download_leaves_no_file(self, flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            Store(URL).download("missing", tmp_path / "in" / "a")
        assert not list((tmp_path / "in").iterdir())

    def test_create_is_exclusive(self) -> None:
        assert Store(URL).create("a", b"1")
        assert not Store(URL).create("a", b"2")
        assert Store(URL).read("a") == b"1"


class TestLease:
    def test_a_living_process_keeps_it(self) -> None:
        Lease(Store(URL)).acquire()
        with pytest.raises(RunInUseError, match="process"):
            Lease(Store(URL)).acquire()

    @pytest.mark.parametrize("holder", [{"host": None, "pid": 2**22 + 1}, {"host": "elsewhere", "pid": 1}])
    def test_that_of_a_process_that_is_gone_expires(self, holder: dict, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store(URL)
        Lease(store).acquire()
        content = json.loads(store.read(LEASE))
        store.write(LEASE, json.dumps({**content, **{k: v for k, v in holder.items() if v}}).encode())
        monkeypatch.setattr(mirror, "LEASE_SECONDS", 0.2)
        Lease(store).acquire()
        assert json.loads(store.read(LEASE))["token"] != content["token"]

    def test_that_of_another_host_which_is_renewed_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store(URL)
        store.write(
            LEASE, json.dumps({"token": "x", "host": "b", "pid": 1, "pid_started": None, "time": 1e12}).encode()
        )
        later = {"token": "x", "host": "b", "pid": 1, "pid_started": None, "time": 2e12}
        monkeypatch.setattr(time, "sleep", lambda seconds: store.write(LEASE, json.dumps(later).encode()))
        with pytest.raises(RunInUseError, match="process 1 on b"):
            Lease(store).acquire()

    def test_a_process_that_lost_it_stops(self) -> None:
        store = Store(URL)
        first = Lease(store)
        first.acquire()
        store.delete([LEASE])
        Lease(store).acquire()
        with pytest.raises(LeaseLostError):
            first.renew()


def session(folder: Path, *, steps: tuple[int, ...] = (), text: str = "") -> None:
    """Add a session to a run folder, with a checkpoint of each step."""
    run = RunDirectory(folder)
    run.start("train: {}\n", {"name": "first"})
    with run.metrics_path.open("a") as file:
        file.writelines(json.dumps({"step": step, "eval/loss": 1 / (1 + step % 3)}) + "\n" for step in steps)
    (folder / "log.txt").write_text(text)
    for step in steps:
        write_checkpoint(folder, step)
    run.finish("finished", "done")


def opened(folder: Path, retention: Retention = ALL) -> Mirror:
    found = Mirror(URL, folder, retention)
    found.open()
    found.start()
    return found


def mirrored(folder: Path, *steps: int, retention: Retention = ALL, text: str = "") -> None:
    """One whole session of a run with this working copy."""
    found = opened(folder, retention)
    session(folder, steps=steps, text=text)
    found.close(0)


def stored() -> set[str]:
    return set(Store(URL).find())


def stored_steps() -> list[int]:
    return list(storage.complete_steps(stored()))


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class TestMirror:
    def test_a_run_moves_to_another_host(self, tmp_path: Path) -> None:
        first, second = tmp_path / "a" / "first", tmp_path / "b" / "first"
        mirrored(first, 4, 8, text="hello")
        mirror_ = opened(second)
        copied = content(second)
        mirror_.close(0)
        expected = {name: data for name, data in content(first).items() if name not in (".lock",) and "/4/" not in name}
        assert copied == expected
        assert LEASE not in stored()

    @pytest.mark.slow
    def test_files_are_uploaded_while_the_run_is_running(self, tmp_path: Path) -> None:
        folder = tmp_path / "first"
        mirror_ = opened(folder)
        RunDirectory(folder).start("train: {}\n", {"name": "first"})
        wait_for(lambda: "run.json" in stored())
        session(folder, steps=(4,))
        wait_for(lambda: stored_steps() and {"metrics.jsonl", "config.yaml"} <= stored())
        assert stored_steps() == [4] and {"metrics.jsonl", "config.yaml", LEASE} <= stored()
        mirror_.close(0)

    def test_a_run_has_not_ended_before_its_last_checkpoint_is_stored(
        self, flaky: type[FlakyFileSystem], tmp_path: Path
    ) -> None:
        """If its process dies before, another host continues the run, instead of reporting that it is finished."""
        folder = tmp_path / "first"
        mirror_ = opened(folder)
        run = RunDirectory(folder)
        run.start("train: {}\n", {"name": "first"})
        write_checkpoint(folder, 4)
        wait_for(lambda: stored_steps() == [4])
        failed = fail(flaky, 10**6, operation="write", path=f"/8/{MANIFEST}")
        write_checkpoint(folder, 8)
        run.finish("finished", "done")
        (folder / "log.txt").write_text("done")
        wait_for(lambda: failed and "log.txt" in stored())
        assert json.loads(Store(URL).read("run.json"))["status"] == "running"
        fail(flaky, 0, operation="write")
        mirror_.close(0)
        assert json.loads(Store(URL).read("run.json"))["status"] == "finished" and stored_steps() == [4, 8]

    @pytest.mark.slow
    def test_a_local_copy_with_later_sessions_is_uploaded(self, tmp_path: Path) -> None:
        folder = tmp_path / "first"
        mirrored(folder, 4)
        session(folder, steps=(8,), text="not uploaded")
        mirror_ = opened(folder)
        mirror_.close(0)
        assert Store(URL).read("log.txt") == b"not uploaded" and stored_steps() == [4, 8]
        assert len(json.loads(Store(URL).read("run.json"))["sessions"]) == 2

    @pytest.mark.slow
    def test_a_local_copy_that_another_host_overtook_is_moved_aside(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = tmp_path / "a" / "first", tmp_path / "b" / "first"
        mirrored(first, 4)
        write_checkpoint(first, 6)  # in the local tier only
        mirrored(second, 8, text="second")
        mirror_ = opened(first)
        assert (first / "log.txt").read_text() == "second"
        assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["8"]
        assert "is ahead of" in caplog.text and len(list(first.parent.glob(".superseded-first-*/checkpoints/6"))) == 1
        mirror_.close(0)

    def test_a_store_that_is_down_loses_nothing(
        self, flaky: type[FlakyFileSystem], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "first"
        mirror_ = opened(folder)
        fail(flaky, 10**6, operation="write")
        session(folder, steps=(4,))
        with pytest.raises(StorageError, match="cannot write"):
            mirror_.close(0)
        before = {name: data for name, data in content(folder).items() if not name.startswith(".")}
        fail(flaky, 0, operation="write")
        opened(folder).close(0)
        assert stored_steps() == [4]
        assert {name: Store(URL).read(name) for name in stored()} == before

    def test_a_session_that_could_not_start_leaves_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "first"
        mirror_ = opened(folder)
        run = RunDirectory(folder)
        run.start("", {"name": "first"})
        wait_for(lambda: "run.json" in stored())
        run.withdraw("wrong")
        mirror_.close(0)
        assert not stored() and not folder.exists()


class TestCheckpoints:
    def test_the_manifest_is_the_last_object(self, flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
        mirrored(tmp_path / "first", 4)
        of_step = [path.rpartition("/4/")[2] for path in flaky.writes if "/checkpoints/4/" in path]
        assert of_step[-1] == MANIFEST and of_step.count(MANIFEST) == 1 and len(of_step) == 6
        metrics, manifest = (flaky.writes.index(next(p for p in flaky.writes if p.endswith(end)))
                             for end in ("metrics.jsonl", "/4/manifest.json"))  # fmt: skip
        assert metrics < manifest

    @pytest.mark.slow
    def test_an_interrupted_upload_does_not_exist_and_is_repeated(
        self, flaky: type[FlakyFileSystem], tmp_path: Path
    ) -> None:
        folder = tmp_path / "first"
        mirrored(folder, 4)
        fail(flaky, 10**6, operation="write", path=f"/8/{MANIFEST}")
        mirror_ = opened(folder)
        session(folder, steps=(8,))
        with pytest.raises(StorageError):
            mirror_.close(0)
        assert stored_steps() == [4] and any("/8/params" in name for name in stored())
        fail(flaky, 0, operation="write")
        other = tmp_path / "b" / "first"
        Store(URL).delete([LEASE])
        opened(other).close(0)
        assert sorted(path.name for path in (other / "checkpoints").iterdir()) == ["4"]
        assert not any("checkpoints/8/" in name for name in stored()), "the rest of the upload is deleted"

    @pytest.mark.slow
    @pytest.mark.default_cases("8-expected1")
    @pytest.mark.parametrize(("persist_every", "expected"), [(None, [12, 16, 20]), (8, [8, 16, 20]), (20, [20])])
    def test_retention(self, persist_every: int | None, expected: list[int], tmp_path: Path) -> None:
        """With checkpoint.persist_every, only its multiples and the last step of the session are in the store."""
        folder = tmp_path / "first"
        tiers = CheckpointTiers(Store(URL), folder, Retention(3, 0, "eval/loss", persist_every))
        for step in (4, 8, 12, 16, 20):
            session(folder, steps=(step,))
            tiers.upload(before_commit=lambda: None, is_final=step == 20)
        assert stored_steps() == expected
        assert {int(name.split("/")[1]) for name in stored() if name.startswith("checkpoints/")} == {*expected}

    def test_keep_best(self, tmp_path: Path) -> None:
        values = {1: 2.0, 2: float("nan"), 3: 1.0, 4: 1.0}
        assert best_steps(values, 2) == [4, 3]
        assert best_steps(values, 2, largest=True) == [1, 4]
        mirrored(tmp_path / "first", 3, 5, 9, 12, retention=Retention(1, 1, "eval/loss", None))
        assert stored_steps() == [5, 12]  # losses 1, 1/3, 1, 1

    def test_a_checkpoint_is_uploaded_while_the_run_deletes_it(
        self, flaky: type[FlakyFileSystem], tmp_path: Path
    ) -> None:
        folder = tmp_path / "first"
        mirror_ = Mirror(URL, folder, ALL)
        mirror_.open()
        session(folder, steps=(4,))

        def before(operation: str, path: str) -> None:
            if operation == "write" and "/4/" in path:
                shutil.rmtree(folder / "checkpoints" / "4", ignore_errors=True)

        flaky.before = staticmethod(before)
        mirror_.close(0)
        assert stored_steps() == [4] and not (folder / PINNED).exists()
        other = tmp_path / "b" / "first"
        opened(other).close(0)
        assert verify_files(other / "checkpoints" / "4") is None

    @pytest.mark.slow
    @pytest.mark.parametrize("tier", ["store", "local"])
    def test_twenty_flipped_bytes(self, tier: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Each is detected and named, and the same step of the other tier is used; with both damaged, the previous."""
        caplog.set_level(logging.INFO, "maxhydra")
        origin, rng = tmp_path / "origin", random.Random(0)
        mirrored(origin, 4, 8)
        intact = content(origin / "checkpoints" / "8")
        snapshot = {name: Store(URL).read(name) for name in stored()}
        for number in range(20):
            caplog.clear()
            for name, data in snapshot.items():
                Store(URL).write(name, data)
            folder = tmp_path / f"{tier}-{number}" / "first"
            shutil.copytree(origin, folder)
            name = rng.choice(sorted(intact))
            position, bit = rng.randrange(len(intact[name])), 1 << rng.randrange(8)
            damaged = bytearray(intact[name])
            damaged[position] ^= bit
            if tier == "store":
                # A host without a local copy, which has only the damaged one and the previous step.
                shutil.rmtree(folder / "checkpoints")
                Store(URL).write(f"checkpoints/8/{name}", bytes(damaged))
            else:
                (folder / "checkpoints" / "8" / name).write_bytes(damaged)
            opened(folder).close(0)
            where = f"{URL}/checkpoints/8" if tier == "store" else str(folder / "checkpoints" / "8")
            assert f"checkpoint {where} is damaged: {name} " in caplog.text
            used = folder / "checkpoints" / ("4" if tier == "store" else "8")
            assert verify_files(used) is None
            assert (folder / "checkpoints" / "8").exists() == (tier == "local")
            assert (8 in stored_steps()) == (tier == "local")
            if tier == "local":
                assert content(used) == intact
                assert len(list((folder / "checkpoints").glob("8.unreadable-*"))) == 1

    def test_without_an_intact_checkpoint_all_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "first"
        mirrored(folder, 4)
        shutil.rmtree(folder)
        Store(URL).delete([next(name for name in stored() if "/4/params" in name)])
        with pytest.raises(StorageError, match="none of the run's 1 checkpoints is intact"):
            opened(folder)
        assert f"checkpoints/4/{MANIFEST}" in stored()


class TestFetch:
    def test_files_and_folders_are_copied_again_only_if_changed(self, flaky: type[FlakyFileSystem]) -> None:
        store = Store("flaky://bucket/hf")
        store.write("config.json", b"{}")
        store.write("old.txt", b"x")
        reads: list[str] = []
        flaky.before = staticmethod(lambda operation, path: reads.append(path) if operation == "read" else None)
        folder = fetch(store.url)
        assert content(folder) == {"config.json": b"{}", "old.txt": b"x"} and len(reads) == 2
        fetch.cache_clear()
        fetch(store.url)
        assert len(reads) == 2
        store.write("config.json", b"[]")
        store.delete(["old.txt"])
        fetch.cache_clear()
        assert content(fetch(store.url)) == {"config.json": b"[]"} and len(reads) == 3
        assert fetch(f"{store.url}/config.json").read_bytes() == b"[]"
        assert not fetch("flaky://bucket/nothing").exists()

    def test_only_the_newest_complete_checkpoint_of_a_run(self, tmp_path: Path) -> None:
        mirrored(tmp_path / "first", 4, 8)
        Store(URL).write("checkpoints/12/params/x", b"incomplete")
        folder = fetch(URL)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["8"]
        assert (folder / "run.json").exists() and verify_files(folder / "checkpoints" / "8") is None
        one = fetch(f"{URL}/checkpoints/4")
        assert one == folder / "checkpoints" / "4" and verify_files(one) is None
        with pytest.raises(StorageError, match="several runs"):
            fetch(URL.rpartition("/")[0])
