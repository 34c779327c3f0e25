"""Worker processes: the same batches as without them, a clear error when one dies, and none left behind."""

import json
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Data
from maxhydra.data import Batch, BatchSpec, RowSpec, train_loader
from maxhydra.data.records import Record
from maxhydra.data.workers import WorkerDied, Workers
from tests.support.cli import ROOT, environment
from tests.support.polling import wait_for
from tests.support.processes import children, is_alive


def doubled(record: Record) -> Record:
    """A formatting function, which a worker imports by name."""
    return {"text": record["text"] * 2}


def reject_the_last(record: Record) -> Record:
    if record["text"].startswith("399 "):
        raise ValueError("it is the last")
    return record


def die(record: Record) -> Record:
    os.kill(os.getpid(), signal.SIGKILL)
    return record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    texts = (f"{index} " + "word " * (index % 17) for index in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers import this file by name."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    assert not children(os.getpid()), "a worker was left behind"


def data_of(path: Path, **values: object) -> Data:
    fields = {"source": "grain", "path": str(path), "cache": str(path.parent / "cache"), **values}
    return Data(**fields)  # type: ignore[arg-type]


def spec() -> BatchSpec:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return BatchSpec(rows=RowSpec(seq_len=64, vocab_size=259, seed=3), batch=4, sharding=sharding)


def take(data: Data, count: int) -> list[Batch]:
    loader = train_loader(data, spec())
    try:
        return [next(loader) for _ in range(count)]
    finally:
        loader.close()


@pytest.mark.slow
def test_workers_give_the_same_batches(path: Path) -> None:
    formatting = "tests.data.test_workers:doubled"
    # More than an epoch, in windows of several chunks.
    alone, helped = (take(data_of(path, formatting=formatting, workers=workers), 60) for workers in (0, 2))
    for one, other in zip(alone, helped, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_and_not_a_hang(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.workers=2: a worker process died"):
        take(data_of(path, formatting="tests.data.test_workers:die", workers=2), 1)


@pytest.mark.slow
def test_an_error_in_a_worker_names_the_record(path: Path) -> None:
    data = data_of(path, formatting="tests.data.test_workers:reject_the_last", workers=1, eval_path=str(path))
    with pytest.raises(ConfigError, match=r"texts.jsonl, line 400.*\n?.*ValueError: it is the last"):
        take(data, 60)


@pytest.mark.slow
def test_workers_can_be_killed_while_they_write() -> None:
    """A result of 64 MB that is not fully read when the pool is closed."""
    for delay in (0.1, 0.6):
        pool = Workers(2, int)
        futures = [pool.submit(operator.mul, b"x", 2**26) for _ in range(4)]
        time.sleep(delay)
        pool.shutdown(cancel_futures=True)
        assert all(future.done() for future in futures)


@pytest.mark.slow
def test_a_pool_returns_results_raises_errors_and_reports_a_dead_worker() -> None:
    with Workers(1, int) as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 7, 0).result()
        with pytest.raises(WorkerDied):
            pool.submit(os._exit, 3).result()
        with pytest.raises(WorkerDied):
            pool.submit(divmod, 7, 2).result()


@pytest.mark.slow
def test_workers_exit_with_a_killed_run(path: Path, tmp_path: Path) -> None:
    script = f"""
from tests.data.test_workers import data_of, spec, train_loader
from pathlib import Path
if __name__ == "__main__":
    loader = train_loader(data_of(Path({str(path)!r}), workers=1), spec())
    next(loader)
    print("ready", flush=True)
    input()
"""
    (tmp_path / "run.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "run.py")],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    (worker,) = children(process.pid)
    # Signals to the run are ignored by its workers.
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGINT)
    time.sleep(0.5)
    assert is_alive(worker)
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(worker))
