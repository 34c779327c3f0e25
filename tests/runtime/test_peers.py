"""Processes of a run notice the death of one of them, and agree on the step at which a signal ends the run."""

import importlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxhydra.config import ConfigError, Problem
from maxhydra.runtime import peers
from tests.support import cli
from tests.support.polling import wait_for


@pytest.fixture(scope="module")
def matrix() -> Any:
    """scripts/death_matrix.py as a module."""
    sys.path.append(str(cli.ROOT / "scripts"))
    return importlib.import_module("death_matrix")


@pytest.fixture(scope="module")
def arguments(matrix: Any) -> list[str]:
    return [*cli.SMALL, "train.per_device_batch_size=2", *matrix.RUN, "train.eval_batches=2"]


@pytest.fixture(scope="module")
def expected(matrix: Any, arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of two processes that are not disturbed."""
    results: dict[str, Any] = matrix.Matrix(tmp_path_factory.mktemp("whole"), matrix.launch, arguments).reference()
    return results


@pytest.mark.slow
def test_a_lost_process_is_named_and_the_run_resumes_in_one_process(
    matrix: Any, arguments: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """The short form of scripts/death_matrix.py."""
    cells = matrix.Matrix(tmp_path, matrix.launch, arguments, resume=1)
    row = cells.run(matrix.Cell("KILL", "0", "save"), expected)
    assert not row.differences and row.restarts == 1, row
    name = f"process 0 on {socket.gethostname()} is gone; last known step "
    assert row.codes == [-signal.SIGKILL, peers.EXIT_LOST] and row.seconds < 200, row
    assert row.status.startswith(f"failed: {name}") and row.messages[1].startswith(f"maxhydra: {name}"), row


@pytest.mark.exhaustive
def test_the_local_launcher_restarts_all_processes_after_the_loss_of_one(
    matrix: Any, arguments: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    sweep, run = tmp_path / "outputs" / "it", tmp_path / "outputs" / "it" / "0"
    launcher = ["-m", "hydra/launcher=local", "hydra.launcher.processes=2", "hydra.launcher.max_restarts=1"]
    command = cli.start_silent(*launcher, *arguments, "train.elastic=true", cwd=tmp_path)
    wait_for(lambda: (run / "checkpoints" / "4").exists())
    pid = json.loads((run / ".job.json").read_text())["pid"]
    os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[1]), signal.SIGKILL)
    assert command.wait(240) == 0
    assert [session["status"] for session in cli.facts(run)["sessions"]] == ["failed", "finished"], sweep
    assert matrix.compare(expected, dict(matrix.read_run("matrix", run))) == []


class Pair:
    """Two processes of a run as threads of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(peers, "BEAT_SECONDS", 0.02)
        self.reasons: list[tuple[str, int]] = []
        monkeypatch.setattr(os, "_exit", lambda code: self.reasons.append(("exit", code)))
        monkeypatch.setattr(logging, "shutdown", lambda: None)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.first, self.second = (peers._Peers(index, 2, 240) for index in range(2))
        self.first.listen(self.server, "token")
        self.second.connect(self.server.getsockname(), "token", 240)
        for index, each in enumerate((self.first, self.second)):
            each.record = lambda reason, index=index: self.reasons.append((reason, index))
        wait_for(lambda: 1 in self.first._connections)

    def close(self) -> None:
        """End the threads, which would otherwise end this process when a later test closes their connections."""
        for each in (self.first, self.second):
            each.has_left = True
            each.is_lost.set()
        wait_for(lambda: not any(thread.name == "peers" for thread in threading.enumerate()))
        self.server.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Pair(monkeypatch)
    yield pair
    pair.close()


def test_all_processes_end_at_the_latest_of_their_calls(pair: Pair) -> None:
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
        thread.join(240)
    assert ends[0] == ends[1] and ends[0][1] == signal.SIGUSR1


def test_a_process_in_a_collective_operation_delays_the_end_by_one_call(pair: Pair) -> None:
    """Process 1 waits for process 0, which is at its call before the operation and knows of the signal."""
    assert pair.second.reached_stop() is None
    pair.first.request_stop(signal.SIGTERM)
    wait_for(lambda: pair.second._agreement._number)
    assert pair.first.reached_stop() is None
    ends = [each.reached_stop() for each in (pair.first, pair.second)]
    assert ends == [signal.SIGTERM] * 2


def test_an_error_is_repeated_by_the_others(pair: Pair) -> None:
    pair.second.step = 7
    pair.second.leave(ValueError("no such file\nmore"))
    wait_for(lambda: ("exit", 1) in pair.reasons)
    assert (f"process 1 on {socket.gethostname()} ended: ValueError: no such file", 0) in pair.reasons


def test_a_config_error_of_one_process_ends_all_with_the_same_message(
    pair: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    pair.first.leave(ConfigError(Problem("task.input", "does not exist", value="a", hint="check the path")))
    wait_for(lambda: ("exit", 2) in pair.reasons)
    pattern = r"process 0 on \S+ ended: task\.input=a: does not exist\n    check the path"
    assert re.fullmatch(pattern, pair.reasons[0][0]) and pair.reasons[0][1] == 1
    assert re.fullmatch(rf"maxhydra: {pattern}\n", capfd.readouterr().err)


def test_the_exit_of_a_process_that_announced_it_is_no_loss(pair: Pair) -> None:
    pair.second.leave(None)
    wait_for(lambda: pair.first._connections[1].has_left)
    pair.second._connections[0].link.shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert pair.reasons == []


@pytest.mark.parametrize("is_exiting", [True, False])
def test_a_process_that_has_ended_its_task_does_not_wait_at_exit_for_a_lost_one(is_exiting: bool, pair: Pair) -> None:
    """Its own exit code is kept, and its record is not overwritten."""
    pair.first.exit_code = 3
    if is_exiting:
        pair.first.exit(None)
    else:
        pair.first.leave(None)
    wait_for(lambda: pair.second._connections[0].has_left)
    pair.second._connections[0].link.shutdown(socket.SHUT_RDWR)
    wait_for(pair.first.is_lost.is_set)
    if not is_exiting:
        assert pair.reasons == []
        pair.first.exit(None)
    wait_for(lambda: pair.reasons)
    assert pair.reasons == [("exit", 3)]


def test_the_error_of_a_collective_operation_gives_way_to_its_cause(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is often noticed before the loss of the process."""
    monkeypatch.setattr(peers, "_active", pair.first)
    monkeypatch.setattr(peers, "REPORT_SECONDS", 0.1)
    threading.Timer(0.1, pair.first.lose, ["process 1 is gone"]).start()
    with pytest.raises(RuntimeError, match="reset"), peers.naming_lost_processes():
        raise RuntimeError("connection reset by peer")
    assert {("process 1 is gone", 0), ("exit", peers.EXIT_LOST)} <= set(pair.reasons)


def test_a_process_is_named_if_it_is_lost_in_a_later_task(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the second job of a sweep."""
    for _ in range(2):
        for each in (pair.first, pair.second):
            with monkeypatch.context() as patch, peers.membership():
                patch.setattr(peers, "_active", each)
    for each in (pair.first, pair.second):
        each.join()
    wait_for(lambda: not pair.first._connections[1].has_left)
    pair.second._connections[0].link.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: any(reason.startswith("process 1 on ") for reason, _ in pair.reasons))
    wait_for(lambda: ("exit", peers.EXIT_LOST) in pair.reasons)


def test_a_process_that_fails_after_the_task_of_another_is_not_waited_for_at_exit(pair: Pair) -> None:
    """Another task could follow, so that only its exit is a loss."""
    pair.first.leave(None)
    pair.second.leave(ValueError("no such file"))
    pair.second.request_stop(signal.SIGTERM)
    wait_for(lambda: pair.first._agreement._number)
    assert not pair.first.is_lost.is_set()
    pair.second._connections[0].link.shutdown(socket.SHUT_RDWR)
    wait_for(pair.first.is_lost.is_set)
    pair.first.exit(None)
    assert pair.reasons == [("exit", 0)]


@pytest.mark.parametrize("fails_too", [True, False])
def test_a_failed_task_of_one_process_ends_those_of_the_others(
    fails_too: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose own task has ended, for the same or another reason, completes its work."""
    monkeypatch.setattr(peers, "FAILURE_SECONDS", 0.1)
    pair.second.end_task("out of memory")
    if fails_too:
        pair.first.end_task("out of memory")
        time.sleep(0.3)
        assert pair.reasons == []
    else:
        wait_for(lambda: ("exit", 1) in pair.reasons)
        assert (f"process 1 on {socket.gethostname()} ended: out of memory", 0) in pair.reasons


def test_the_failure_of_a_task_does_not_end_the_next_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep continues after a job that fails in all processes."""
    monkeypatch.setattr(peers, "FAILURE_SECONDS", 0.1)
    for each in (pair.first, pair.second):
        each.join()
    for each in (pair.first, pair.second):
        each.end_task("out of memory")
        each.leave(None)
    for each in (pair.first, pair.second):
        each.join()
    time.sleep(0.3)
    assert pair.reasons == []
    pair.second.end_task("out of memory")
    wait_for(lambda: ("exit", 1) in pair.reasons)


def test_a_process_whose_error_ended_the_others_begins_no_other_task(pair: Pair) -> None:
    """Such as the next job of a sweep; it ends with the exit code of the error."""
    pair.second.leave(ConfigError(Problem("task.input", "does not exist")))
    wait_for(pair.second.is_lost.is_set)
    pair.reasons.clear()
    pair.second.join()
    assert {code for name, code in pair.reasons if name == "exit"} == {2}


@pytest.mark.parametrize("is_early", [True, False])
def test_a_process_that_dies_between_two_tasks_is_named(pair: Pair, is_early: bool) -> None:
    """Before or after the other one begins the next task."""
    for each in (pair.first, pair.second):
        each.join()
        each.leave(None)
    wait_for(lambda: pair.first._connections[1].has_left)
    if not is_early:
        pair.first.join()
    pair.second._connections[0].link.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: pair.first._connections[1].is_closed)
    if is_early:
        assert pair.reasons == []
        pair.first.join()
    wait_for(lambda: ("exit", peers.EXIT_LOST) in pair.reasons)
    name = f"process 1 on {socket.gethostname()} is gone; "
    assert any(reason.startswith(name) for reason, _ in pair.reasons), pair.reasons


def test_an_error_is_passed_on_by_a_process_that_has_ended_its_task(pair: Pair) -> None:
    pair.first.leave(None)
    pair.second.leave(ConfigError(Problem("task.input", "does not exist")))
    wait_for(lambda: pair.first._connections[1].error[0])
    pair.second._connections[0].link.shutdown(socket.SHUT_RDWR)
    wait_for(pair.first.is_lost.is_set)
    assert pair.first._loss == (f"process 1 on {socket.gethostname()} ended: task.input: does not exist", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "code"), [(0.5, peers.EXIT_LOST), (30.0, -signal.SIGABRT)])
def test_a_process_that_aborts_may_end_with_a_reason_before(seconds: float, code: int) -> None:
    """As jax.distributed does when process 0 dies. Without a reason it aborts a few seconds later."""
    program = f"""
import ctypes, os, threading, time
from maxhydra.runtime import exits
exits.delay_aborts()
threading.Thread(target=ctypes.CDLL(None).abort).start()
time.sleep({seconds})
os._exit({peers.EXIT_LOST})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=cli.ROOT, timeout=240, check=False)
    assert done.returncode == code


def test_a_process_that_never_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.02)
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    reasons: list[str] = []
    first = peers._Peers(0, 3, 0.1)
    first.record = reasons.append
    first.listen(socket.create_server(("127.0.0.1", 0)), "token")
    wait_for(lambda: exits)
    assert reasons == ["process 1 has not connected for 0 s"] and exits == [peers.EXIT_LOST]


def test_a_connection_without_the_token_is_closed(pair: Pair) -> None:
    with socket.create_connection(pair.server.getsockname(), 240) as stranger:
        stranger.sendall(b'{"token": "other", "index": 1, "host": "x"}\n')
        assert stranger.recv(10) == b""
    assert pair.first._connections[1].host == socket.gethostname() and pair.reasons == []
