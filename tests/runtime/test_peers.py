"""Processes of a run notice the death of one of them, and agree on the step at which a signal ends the run."""

import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from maxhydra.runtime import peers
from tests.support import cli

RUN = [*cli.SMALL, "run.name=it", "mesh.data=2", "train.per_device_batch_size=2", "train.log_every=2"]


def has_rows(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


@pytest.mark.slow
def test_the_death_of_a_process_is_named_by_the_other_and_the_run_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "it"
    for victim in (1, 0):
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        processes = cli.start_processes(2, *RUN, "train.steps=100000", "checkpoint.every=5", cwd=tmp_path)
        while all(process.is_running() for process in processes) and not has_rows(folder):
            time.sleep(0.01)
        processes[victim].signal(signal.SIGKILL)
        killed_at = time.monotonic()
        assert processes[1 - victim].wait(60) == peers.EXIT_LOST
        assert time.monotonic() - killed_at < 15
        record = json.loads((folder / "run.json").read_text())
        expected = f"process {victim} on {socket.gethostname()} is gone; last known step "
        assert record["status"] == record["sessions"][-1]["status"] == "failed"
        assert record["reason"].startswith(expected), record["reason"]
        assert expected in (tmp_path / f"console.{1 - victim}").read_text()


class Pair:
    """Two processes of a run as threads of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, silence: float = 60, beat: float = 0.02):
        monkeypatch.setattr(peers, "BEAT_SECONDS", beat)
        self.reasons: list[tuple[str, int]] = []
        monkeypatch.setattr(peers.os, "_exit", lambda code: self.reasons.append(("exit", code)))
        self.server = socket.create_server(("127.0.0.1", 0))
        self.first, self.second = (peers._Peers(index, 2, silence) for index in range(2))
        self.first.listen(self.server, "token")
        self.second.connect(self.server.getsockname(), "token", 5)
        for index, each in enumerate((self.first, self.second)):
            each.record = lambda reason, index=index: self.reasons.append((reason, index))
        wait_until(lambda: 1 in self.first._connections)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_processes_end_at_the_latest_of_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    ends = {}

    def run(index: int, calls_before: int) -> None:
        each, calls = (pair.first, pair.second)[index], 0
        while (number := each.reached_stop()) is None:
            calls += 1
            if calls == calls_before and index == 1:
                each.request_stop(signal.SIGUSR1)
            time.sleep(0.002 if index else 0.001)
        ends[index] = (calls, number)

    threads = [threading.Thread(target=run, args=(index, 5)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ends[0] == ends[1] and ends[0][1] == signal.SIGUSR1


def test_an_error_is_repeated_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    pair.second.step = 7
    pair.second.leave(ValueError("no such file\nmore"))
    wait_until(lambda: ("exit", 1) in pair.reasons)
    assert (f"process 1 on {socket.gethostname()} ended: ValueError: no such file", 0) in pair.reasons


def test_the_exit_of_a_process_that_announced_it_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    pair.second.leave(None)
    wait_until(lambda: pair.first._connections[1].has_left)
    pair.second._connections[0].link.shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert pair.reasons == []


def test_a_connection_without_the_token_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    with socket.create_connection(pair.server.getsockname(), 5) as stranger:
        stranger.sendall(b'{"token": "other", "index": 1, "host": "x"}\n')
        assert stranger.recv(10) == b""
    assert pair.first._connections[1].host == socket.gethostname() and pair.reasons == []
