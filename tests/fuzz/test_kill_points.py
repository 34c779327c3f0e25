"""kill -9 at random points of what commands do on disk: nothing is half-written, and the same command completes it."""

import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Data
from maxhydra.data.shards import COUNTERS_PER_SHARD, Shards, open_index
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.labels import read_labels
from maxhydra.runs.registry import Registry
from maxhydra.sweep.plan import Settings, SweepPlan, read_plan, write_plan
from tests.support.fuzzing import fuzz
from tests.support.kill_points import count_calls, kill_at
from tests.support.run_folders import CONFIG, write_run

pytestmark = pytest.mark.slow

# The point of the kill as a fraction of the action.
POINTS = st.floats(0, 1)
Act = Callable[[Path], object]
Prepare = Callable[[Path], object]


@contextmanager
def killed(act: Act, point: float, folder: Path, prepare: Prepare) -> Iterator[Path]:
    """A new folder after `prepare`, in which `act` was killed at the point."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        root = Path(temporary)
        prepare(root)
        kill_at(lambda: act(root), 1 + int(point * _num_calls(act, prepare)))
        yield root


@functools.cache
def _num_calls(act: Act, prepare: Prepare) -> int:
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        return count_calls(lambda: act(Path(folder)))


def write_nothing(root: Path) -> None:
    pass


def write_old(root: Path) -> None:
    (root / "file").write_text("old")


def write_new(root: Path) -> None:
    replace_file(root / "file", "new " * 5000)


@fuzz(cases=25, point=POINTS, has_old=st.booleans())
def test_a_file_is_replaced_as_a_whole(point, has_old, tmp_path):
    with killed(write_new, point, tmp_path, write_old if has_old else write_nothing) as root:
        if has_old or (root / "file").exists():
            assert (root / "file").read_text() in ("old", "new " * 5000)
        write_new(root)
        assert (root / "file").read_text() == "new " * 5000


def train(root: Path) -> None:
    """A session that resumes at the last complete row of metrics."""
    run = RunDirectory(root / "run")
    with run.session(CONFIG.format(rate=1, seed=0, notes="''"), {"task": "pretrain", "tags": [], "notes": ""}):
        rows = read_metrics(run.metrics_path) if run.metrics_path.exists() else []
        writer = MetricsWriter(run.metrics_path)
        for step in range(int(rows[-1]["step"]) if rows else 0, 5):
            writer.write(step + 1, {"loss": 1 / (step + 1)})
            writer.flush()
            run.update(seen=str(step))
        writer.close()
        run.finish("finished", "done")


@fuzz(cases=6, point=POINTS)
@example(point=1.0)
def test_a_run_is_listed_and_resumes(point, tmp_path):
    with killed(train, point, tmp_path, write_nothing) as root:
        run = RunDirectory(root / "run", writes=False)
        registry = Registry(root)
        listed = registry.runs()
        registry.close()
        assert [each.status for each in listed] in ([], ["lost"], ["finished"]) and len(listed) == run.exists()
        train(root)
        assert [row["loss"] for row in read_metrics(run.metrics_path)] == [1 / step for step in range(1, 6)]
        facts = run.read()
        assert facts["status"] == "finished" and {session["status"] for session in facts["sessions"]} <= {
            "lost",
            "finished",
        }


def write_labelled(root: Path) -> None:
    RunDirectory(write_run(root / "run", steps=1)).label(add=["before"], note="old")


def relabel(root: Path) -> None:
    RunDirectory(root / "run").label(add=["after"], remove=["before"], note="new")


@pytest.mark.exhaustive
@fuzz(cases=15, point=POINTS)
def test_tags_and_note_are_replaced_at_once(point, tmp_path):
    with killed(relabel, point, tmp_path, write_labelled) as root:
        facts = RunDirectory(root / "run", writes=False).read()
        assert (facts["tags"], facts["notes"]) in ((["before"], "old"), (["after"], "new"))
        relabel(root)
        assert read_labels(root / "run")["note"] == "new"


def write_two_runs(root: Path) -> None:
    for name in ("kept", "removed"):
        (write_run(root / name, steps=2) / "checkpoints" / "2").mkdir(parents=True)
        (root / name / "checkpoints" / "2" / "weights").write_bytes(b"1" * 100)


def remove_run(root: Path) -> None:
    if RunDirectory(root / "removed").exists():
        RunDirectory(root / "removed").remove()


def remove_checkpoints(root: Path) -> None:
    RunDirectory(root / "removed").remove_checkpoints()


@fuzz(cases=16, point=POINTS, act=st.sampled_from([remove_run, remove_checkpoints]))
def test_a_run_is_removed_as_a_whole(point, act, tmp_path):
    with killed(act, point, tmp_path, write_two_runs) as root:
        registry = Registry(root)
        paths = {run.path for run in registry.runs()}
        registry.close()
        assert "kept" in paths and (root / "kept/checkpoints/2/weights").read_bytes() == b"1" * 100
        weights = root / "removed/checkpoints/2/weights"
        assert not (root / "removed/checkpoints").exists() or weights.exists()
        act(root)
        assert not weights.exists() and (root / "removed").exists() == (act is remove_checkpoints)


def refresh(root: Path) -> None:
    registry = Registry(root)
    registry.refresh()
    registry.close()


@pytest.mark.exhaustive
@fuzz(cases=10, point=POINTS)
def test_the_index_of_runs_is_complete(point, tmp_path):
    with killed(refresh, point, tmp_path, write_two_runs) as root:
        registry = Registry(root)
        assert sorted(run.path for run in registry.runs()) == ["kept", "removed"]
        assert all(len(registry.settings([run.id])[run.id]) > 5 for run in registry.runs())
        assert not registry.read_errors()
        registry.close()


PLAN = SweepPlan(Path(), ("train.steps=3",), {"a": "1,2"}, (), (), ("eval/loss",), Settings(), None)


def write_first_plan(root: Path) -> None:
    write_plan(dataclasses.replace(PLAN, folder=root / "sweep"))


def write_second_plan(root: Path) -> None:
    write_plan(dataclasses.replace(PLAN, folder=root / "sweep", fixed=("train.steps=4",)))


@pytest.mark.exhaustive
@fuzz(cases=15, point=POINTS, has_old=st.booleans())
def test_a_sweep_has_its_old_or_its_new_plan(point, has_old, tmp_path):
    prepare = write_first_plan if has_old else write_nothing
    with killed(write_second_plan, point, tmp_path, prepare) as root:
        try:
            assert read_plan(root / "sweep").fixed in (("train.steps=3",), ("train.steps=4",))
        except ConfigError as error:
            assert not has_old and "is not a sweep" in str(error)
        write_second_plan(root)
        assert read_plan(root / "sweep").fixed == ("train.steps=4",)


def write_texts(root: Path) -> None:
    lines = [json.dumps({"text": f"{number} " + "word " * (number % 7)}) for number in range(30)]
    (root / "texts.jsonl").write_text("\n".join(lines) + "\n")


def tokenize(root: Path) -> None:
    data = Data(source="grain", path=str(root / "texts.jsonl"), cache=str(root / "cache"))  # type: ignore[call-arg]
    shards = Shards(data, root / "out", 3)
    with open_index(root / "out", data, shards, 3) as index:
        for shard in range(3):
            if shards.name(shard) not in index.done:
                index.add(shards.name(shard), shards.write(shard, [0] * COUNTERS_PER_SHARD * 3))


def output(root: Path) -> dict[str, bytes]:
    """Files of the output; the index without the folder's own name."""
    files = {path.name: path.read_bytes() for path in (root / "out").iterdir() if not path.name.startswith(".")}
    return {name: content.replace(str(root).encode(), b"ROOT") for name, content in files.items()}


@functools.cache
def uninterrupted() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        tokenize(Path(folder))
        return output(Path(folder))


@fuzz(cases=6, point=POINTS)
def test_shards_are_completed(point, tmp_path):
    with killed(tokenize, point, tmp_path, write_texts) as root:
        tokenize(root)
        assert output(root) == uninterrupted() and len(uninterrupted()) == 4
        shutil.rmtree(root / "cache", ignore_errors=True)
