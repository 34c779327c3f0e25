"""A step that hangs is reported with the stacks of all threads, and ends the run; the second SIGTERM ends it too."""

import signal
import threading
import time
from pathlib import Path

import pytest

from maxhydra.config.schema.health import Watchdog as Settings
from maxhydra.runtime import peers, signals
from maxhydra.runtime import watchdog as watchdog_module
from maxhydra.runtime.watchdog import Watchdog, format_stacks
from tests.support import cli
from tests.support.polling import wait_for

FAST = Settings(factor=3, min_seconds=0.7, first_seconds=0.7, end_seconds=1.4)
# A training run in which a callback of step 12 sleeps. With several processes, callbacks run in process 0.
SCRIPT = """
import sys, time
from pathlib import Path
import jax
from maxhydra.cli.main import run
from maxhydra.tasks import pretrain

calls = 0

def sleep_in_callback():
    global calls
    calls += 1
    if calls == 12:
        Path("hangs").touch()
        time.sleep(600)

def make_loss(*arguments, original=pretrain.training_loss):
    loss = original(*arguments)
    def loss_with_callback(params, batch, key):
        jax.debug.callback(sleep_in_callback)
        return loss(params, batch, key)
    return loss_with_callback

pretrain.training_loss = make_loss
sys.exit(run(sys.argv[1:]))
"""
GIL_SCRIPT = """
import ctypes, threading
from pathlib import Path
from maxhydra.config.schema.health import Watchdog as Settings
from maxhydra.runtime import watchdog

def hold_the_gil():
    ctypes.PyDLL(None).sleep(600)

armed = threading.Event()

class Watchdog(watchdog.Watchdog):
    def _arm_faulthandler(self):
        super()._arm_faulthandler()
        armed.set()

watchdog.GIL_SECONDS = 0.5
Watchdog(Settings(factor=3, min_seconds=3, first_seconds=3, end_seconds=0.2), Path()).start(0)
armed.wait()
hold_the_gil()
"""
RUN = [*cli.SMALL, "data=arithmetic", "train.eval_batches=0", "checkpoint.every=4", "train.steps=20", "run.name=it"]
BOUNDS = [f"watchdog.{key}={value}" for key, value in (("min_seconds", 6), ("first_seconds", 30), ("end_seconds", 3))]


class Result:
    """An output of a step; `is_ready` is set by the test."""

    def __init__(self, ready: bool = True):
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready


class Clock:
    """Time that passes only when a test says so."""

    strftime = staticmethod(time.strftime)

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(watchdog_module, "time", clock := Clock())
    return clock


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(peers, "end_run", found.append)
    return found


@pytest.fixture
def watchdog(tmp_path: Path, clock: Clock, ends: list[str]) -> Watchdog:
    """A watchdog without its thread, after 8 steps of 0.05 s."""
    watchdog = Watchdog(FAST, tmp_path)
    watchdog.reset(0)
    for step in range(1, 9):
        watchdog.count_step(step, Result())
        wait(watchdog, clock, 0.05)
    assert not ends and not (tmp_path / "stacks-0.txt").exists()
    return watchdog


def wait(watchdog: Watchdog, clock: Clock, seconds: float) -> None:
    """Let time pass, with a poll every 0.05 s from another thread."""

    def poll() -> None:
        for _ in range(round(seconds / 0.05)):
            clock.now += 0.05
            watchdog.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    thread.join()


def test_a_hung_step_is_reported_once_and_then_ends_the_run(
    tmp_path: Path, watchdog: Watchdog, clock: Clock, ends: list[str]
) -> None:
    watchdog.count_step(9, Result(ready=False))
    wait(watchdog, clock, 2.0)
    assert not ends
    wait(watchdog, clock, 0.5)
    text = (tmp_path / "stacks-0.txt").read_text()
    assert text.count("step 9 has not completed for ") == 1 and "Thread MainThread" in text
    assert "test_a_hung_step_is_reported_once" in text
    assert ends[0].startswith("step 9 has not completed for ") and "(median 0.05 s)" in ends[0]


def test_a_slow_step_that_completes_does_not_end_the_run(
    tmp_path: Path, watchdog: Watchdog, clock: Clock, ends: list[str]
) -> None:
    slow = Result(ready=False)
    watchdog.count_step(9, slow)
    wait(watchdog, clock, 1.0)
    slow.ready = True
    # Steps as slow as this one, such as those after a rollout, are expected from now on.
    wait(watchdog, clock, 1.5)
    assert watchdog.bound > 2 * FAST.min_seconds
    assert not ends and (tmp_path / "stacks-0.txt").read_text().count("has not completed") == 1


def test_a_pause_a_stopped_process_and_a_compilation_are_not_a_hung_step(
    tmp_path: Path, watchdog: Watchdog, clock: Clock, ends: list[str]
) -> None:
    def backend_compile_and_load() -> None:
        wait(watchdog, clock, 2.5)

    with watchdog.paused():
        wait(watchdog, clock, 2.5)
    clock.now += 2.5
    watchdog.poll()
    backend_compile_and_load()
    assert not ends and not (tmp_path / "stacks-0.txt").exists()
    wait(watchdog, clock, 1.0)
    assert (tmp_path / "stacks-0.txt").exists()


def test_without_a_factor_nothing_is_watched(tmp_path: Path, ends: list[str]) -> None:
    watchdog, before = Watchdog(Settings(factor=None, min_seconds=0.01), tmp_path), {*threading.enumerate()}
    watchdog.start(0)
    watchdog.count_step(1, Result())
    assert "watchdog" not in {thread.name for thread in {*threading.enumerate()} - before}
    assert "MainThread" not in format_stacks()


def test_native_code_that_holds_the_gil_is_ended_by_faulthandler(tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(GIL_SCRIPT)
    assert start(tmp_path).wait(240) == 1
    assert "hold_the_gil" in (tmp_path / "console").read_text()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "hung.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, *arguments: str) -> "cli.fork_server.Command":
    with (folder / "console").open("w") as console, open("/dev/null") as null:
        return cli.start(*RUN, *arguments, cwd=folder, streams=(null, console, console), module="hung")


@pytest.mark.exhaustive
def test_a_step_that_hangs_inside_xla_ends_with_75_and_the_run_resumes(script: Path) -> None:
    folder = script / "outputs" / "it"
    assert start(script, *BOUNDS).wait(240) == peers.EXIT_LOST, (script / "console").read_text()
    facts = cli.facts(folder)
    assert facts["status"] == "failed" and facts["reason"].startswith("step 12 has not completed for"), facts["reason"]
    for path in (folder / "stacks-0.txt", folder / "log.txt"):
        assert "sleep_in_callback" in path.read_text() and "Thread MainThread" in path.read_text()
    assert "run the same command again to resume" in (script / "console").read_text()
    cli.run_ok(*RUN, cwd=script)
    assert cli.facts(folder)["status"] == "finished" and cli.facts(folder)["start_step"] == 8


@pytest.mark.exhaustive
def test_the_second_sigterm_ends_a_step_that_hangs_inside_xla(script: Path) -> None:
    process = start(script)
    wait_for((script / "hangs").exists)
    process.signal(signal.SIGTERM)
    time.sleep(signals.REPEAT_SECONDS + 0.5)
    assert process.is_running()
    while process.is_running():
        process.signal(signal.SIGTERM)
        time.sleep(signals.REPEAT_SECONDS + 0.5)
    assert process.wait(240) == 143
    assert cli.facts(script / "outputs" / "it")["status"] == "preempted"


@pytest.mark.exhaustive
def test_every_process_writes_its_stacks_and_ends(script: Path) -> None:
    more = ["mesh.data=2", "train.per_device_batch_size=2", *BOUNDS]
    processes = cli.start_processes(2, *RUN, *more, cwd=script, module="hung")
    assert [process.wait(240) for process in processes] == [peers.EXIT_LOST] * 2
    folder = script / "outputs" / "it"
    assert cli.facts(folder)["reason"].startswith("step 12 has not completed for")
    assert "sleep_in_callback" in (folder / "stacks-0.txt").read_text()
    waiting = (folder / "stacks-1.txt").read_text()
    assert "Thread MainThread" in waiting and "sleep_in_callback" not in waiting
