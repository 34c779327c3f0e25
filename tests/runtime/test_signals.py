"""Signals end a process at once, or when its work is saved; even if its main thread does not execute Python code."""

import signal
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from maxhydra.runtime import signals
from tests.support import cli
from tests.support.fork_server import Command
from tests.support.polling import wait_for

# Waits like a compilation: in native code, without the GIL, and without noticing signals.
NATIVE_WORK = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
SCRIPT = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from maxhydra.runtime import signals

def write(text):
    print(text, flush=True)

with signals.installed():
    signals.attach_run(lambda reason: write(f"recorded: {{reason}}"), processes=1)
    signals.set_phase("in a test")
    try:
        write("ready")
        {body}
    except signals.Interrupted as error:
        write(f"interrupted: {{error}}")
        sys.exit(7)
"""
DEFERRED = """
        with signals.Deferral() as deferral:
            deferral.start()
            write("deferred")
            while not signals.requested():
                time.sleep(0.01)
            {then}
            write("saved")
"""
WAIT = "while not os.path.exists('go'): time.sleep(0.01)"
SAVED_LATER = DEFERRED.format(then=f"\n            {WAIT}") + "            signals.dismiss()"


def start(folder: Path, body: str) -> tuple[Command, IO[str]]:
    """Start a script, and wait until it has installed its handlers."""
    (folder / "script.py").write_text(SCRIPT.format(body=body))
    console = open(folder / "console", "w+")  # noqa: SIM115
    with open("/dev/null") as null:
        process = cli.start(cwd=folder, streams=(null, console, console), module="script")
    wait_until_shown(console, "ready")
    return process, console


def wait_until_shown(console: IO[str], text: str) -> None:
    wait_for(lambda: text in read(console))


def signal_again(process: Command) -> None:
    """Send SIGTERM until the process ends: on a busy machine it may notice the first one late."""
    while process.is_running():
        time.sleep(signals.REPEAT_SECONDS + 0.1)
        process.signal(signal.SIGTERM)


def read(console: IO[str]) -> str:
    console.seek(0)
    return console.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_interrupts_the_main_thread(tmp_path: Path, number: signal.Signals) -> None:
    process, console = start(tmp_path, "time.sleep(60)")
    process.signal(number)
    assert process.wait(240) == 7
    assert f"interrupted: {number.name} in a test" in read(console) and "recorded" not in read(console)
    assert signals.exit_code(f"{number.name} in a test") == 128 + number


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [NATIVE_WORK, "pool = ThreadPoolExecutor(1)\n        with pool:\n            pool.submit(time.sleep, 60).result()"],
    ids=["main thread in native code", "main thread waits for a thread"],
)
def test_a_process_that_cannot_react_is_recorded_and_ends(tmp_path: Path, body: str) -> None:
    process, console = start(tmp_path, body)
    time.sleep(0.2)
    process.signal(signal.SIGTERM)
    assert process.wait(240) == 143
    assert "recorded: SIGTERM in a test" in read(console)


def test_a_deferred_signal_waits_until_the_work_is_saved(tmp_path: Path) -> None:
    # A busy machine may deliver the second one late.
    process, console = start(tmp_path, f"\n        signals.REPEAT_SECONDS = 240{SAVED_LATER}")
    wait_until_shown(console, "deferred")
    process.signal(signal.SIGTERM)
    # A terminal that closes sends the signal twice.
    process.signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(240) == 0
    assert read(console).split() == ["ready", "deferred", "saved"]


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process, console = start(tmp_path, DEFERRED.format(then=f"write('saving'); {NATIVE_WORK}"))
    wait_until_shown(console, "deferred")
    process.signal(signal.SIGTERM)
    wait_until_shown(console, "saving")
    signal_again(process)
    assert process.wait(240) == 143 and "saved" not in read(console)


def test_sigterm_after_sigusr1_is_not_a_repetition(tmp_path: Path) -> None:
    """SLURM sends SIGUSR1 before the time limit and SIGTERM at the limit; the save may need the time after it."""
    process, console = start(tmp_path, SAVED_LATER)
    wait_until_shown(console, "deferred")
    process.signal(signal.SIGUSR1)
    time.sleep(signals.REPEAT_SECONDS + 0.1)
    process.signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(240) == 0 and "saved" in read(console)


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    body = "write(str(signals._active is not None)); time.sleep(1); write('done')"
    (tmp_path / "nohup.py").write_text("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); import script")
    (tmp_path / "script.py").write_text(SCRIPT.format(body=body))
    with open(tmp_path / "console", "w+") as console, open("/dev/null") as null:
        process = cli.start(cwd=tmp_path, streams=(null, console, console), module="nohup")
        wait_until_shown(console, "ready")
        process.signal(signal.SIGHUP)
        assert process.wait(240) == 0 and "done" in read(console)


def test_nothing_is_handled_without_installation() -> None:
    signals.check()
    assert signals.requested() is None and not signals.has_interrupted() and not signals.is_distributed()
    assert sys.modules["maxhydra.runtime.signals"]._active is None
