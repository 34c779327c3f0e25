"""The rollouts of a run: appended, found again, bounded, and exactly once after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from maxhydra.record import rollout_store
from maxhydra.record.rollout_store import RolloutWriter, read_index, search
from maxhydra.record.rollouts import Query, files


def record(step: int, sample: int = 0, **fields: Any) -> dict[str, Any]:
    base = {"prompt_number": step, "sample": sample, "reward": step + sample / 10, "tokens": 3}
    return {**base, "prompt": f"question {step}", "completion": f"Completion {step}.{sample}", **fields}


def fill(folder: Path, steps: range, *, keep: int = 1000) -> RolloutWriter:
    writer = RolloutWriter(folder, "train", keep=keep)
    for step in steps:
        writer.append(step, [record(step, sample) for sample in range(2)])
    return writer


def found(folder: Path, **fields: Any) -> list[tuple[int, int]]:
    page = search(folder, Query(**{"limit": 10**9, **fields}))
    return [(item["step"], item["sample"]) for item in page.records]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_store, "FILE_ROWS", 6)


@pytest.mark.usefixtures("small_files")
def test_completions_are_found_by_step_reward_prompt_and_text(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 11))
    assert len(files(tmp_path, "train")) == 4
    everything = [(step, sample) for step in range(1, 11) for sample in range(2)]
    assert found(tmp_path, order="oldest") == everything
    assert found(tmp_path)[:3] == [(10, 0), (10, 1), (9, 0)]
    assert found(tmp_path, order="best")[:2] == [(10, 1), (10, 0)]
    assert found(tmp_path, order="worst", limit=2, start=1) == [(1, 1), (2, 0)]
    assert found(tmp_path, first_step=3, last_step=4, order="oldest") == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert found(tmp_path, min_reward=3.05, max_reward=4, order="oldest") == [(3, 1), (4, 0)]
    assert found(tmp_path, prompt_number=7) == [(7, 0), (7, 1)]
    assert found(tmp_path, text="COMPLETION 5.1") == [(5, 1)]
    assert search(tmp_path, Query(limit=1)).total == 20
    assert search(tmp_path, Query(kind="eval")).records == []


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("resumed", [1, 2, 4, 5, 10, 11])
def test_a_resumed_session_replaces_what_it_repeats(tmp_path: Path, resumed: int) -> None:
    fill(tmp_path, range(1, 11))
    fill(tmp_path, range(resumed, 13))
    assert found(tmp_path, order="oldest") == [(step, sample) for step in range(1, 13) for sample in range(2)]


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("damage", ["index is missing", "index is old", "line is cut", "line is damaged"])
def test_damaged_files_cost_their_own_lines_only(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, range(1, 9))
    first, last = files(tmp_path, "train")[0], files(tmp_path, "train")[-1]
    expected = [(step, sample) for step in range(1, 9) for sample in range(2)]
    if damage == "index is missing":
        first.with_suffix(".npy").unlink()
    elif damage == "index is old":
        first.with_suffix(".npy").write_bytes(b"\x93NUMPY")
    elif damage == "line is cut":
        os.truncate(last, last.stat().st_size - 5)
        expected.remove((8, 1))
    else:
        content = last.read_bytes()
        last.write_bytes(content.replace(b'{"step": 8', b'{"step: 8', 1))
        expected.remove((8, 0))
    assert found(tmp_path, order="oldest") == expected
    fill(tmp_path, range(9, 10))
    assert found(tmp_path, order="oldest") == [*expected, (9, 0), (9, 1)]


def test_old_files_are_deleted(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 101), keep=50)
    remaining = found(tmp_path, order="oldest")
    assert 50 <= len(remaining) < 60
    assert remaining == [(step, sample) for step in range(1, 101) for sample in range(2)][-len(remaining) :]
    assert all(len(read_index(path)) <= 6 for path in files(tmp_path, "train"))


@pytest.mark.slow
def test_a_killed_writer_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Killed at a random moment of a loop of appends, and resumed from a step that was complete before."""
    program = (
        "import sys; from maxhydra.record import rollout_store; rollout_store.FILE_ROWS = 64\n"
        "from tests.record.test_rollout_store import record\n"
        "writer, step = rollout_store.RolloutWriter(sys.argv[1], 'train', keep=10**6), int(sys.argv[2])\n"
        "while step <= int(sys.argv[3]):\n"
        "    writer.append(step, [record(step, sample, completion='x' * 4000) for sample in range(16)])\n"
        "    print(step, flush=True)\n"
        "    step += 1\n"
    )
    start = 1
    for delay in (0.01, 0.03, 0.002):
        command = [sys.executable, "-c", program, str(tmp_path), str(start), "100000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        appended = [int(line) for line in process.communicate()[0].split()] or [start]
        start = max(start, appended[-1] - 3)
    subprocess.run([sys.executable, "-c", program, str(tmp_path), str(start), str(start + 5)], check=True)
    assert found(tmp_path, order="oldest") == [(step, sample) for step in range(1, start + 6) for sample in range(16)]


def test_lines_are_strict_json(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, "eval", keep=10)
    writer.append(0, [record(0, completion="\ud800 \u2028\n\r", reward=float("nan"))])
    (line,) = files(tmp_path, "eval")[0].read_bytes().split(b"\n")[:-1]
    json.loads(line, parse_constant=pytest.fail)
    (only,) = search(tmp_path, Query(kind="eval")).records
    assert only["completion"] == "? \u2028\n\r"
