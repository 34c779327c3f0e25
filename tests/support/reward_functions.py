"""User-defined reward functions, valid and faulty, referenced by import path."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any


def vowels(text: str, **known: Any) -> int:
    return sum(text.count(vowel) for vowel in "aeiou")


def known(text: str, *, prompt: str, answer: str, expected: Any, record: dict[str, Any]) -> float:
    return float((text, prompt, answer, expected, record["level"]) == ("x=3", "x?", "3", 3, 2))


def raises(text: str, **known: Any) -> float:
    raise RuntimeError(f"cannot judge {text}")


def hangs_at_b(text: str, **known: Any) -> float:
    while text == "b":
        time.sleep(1)
    return 1.0


def hangs(text: str, **known: Any) -> float:
    while True:
        time.sleep(1)


def not_a_number(text: str, **known: Any) -> Any:
    return {"a": float("nan"), "b": None, "c": "0.5", "d": 0.5}[text]


def exits(text: str, **known: Any) -> float:
    os._exit(3)


def equal(text: str, **known: Any) -> float:
    return 0.25


def runs_a_command(text: str, *, record: dict[str, Any], **known: Any) -> float:
    """Waits for a child that lives longer than the time limit."""
    _note_pid(record, subprocess.Popen(["sleep", "600"])).wait()
    return 1.0


def starts_a_daemon(text: str, *, record: dict[str, Any], **known: Any) -> float:
    """Leaves a process in a session of its own, whose parent has exited, and returns at once."""
    script = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, start_new_session=True).pid)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, start_new_session=True)
    with open(record["pids"], "a") as file:
        file.write(done.stdout.decode())
    if record.get("hangs"):
        time.sleep(600)
    if record.get("crashes"):
        os._exit(1)
    return 1.0


def forks(text: str, **known: Any) -> float:
    """Two processes return; only the first is the reward process."""
    return 1.0 if os.fork() else 2.0


def writes_to_descriptors(text: str, **known: Any) -> float:
    for descriptor in range(3, 2048):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\x00\x00\x00\x40garbage")
    if text == "hangs":
        time.sleep(600)
    return 1.0


def open_descriptors(text: str, **known: Any) -> float:
    """Number of descriptors that a child of the reward process inherits, besides stdin, stdout and stderr."""
    script = "import os; print(len([fd for fd in os.listdir('/proc/self/fd') if int(fd) > 2]) - 1)"
    return float(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)


def allocates(text: str, **known: Any) -> float:
    return float(len(bytearray(2 << 30)))


def has_jax(text: str, **known: Any) -> float:
    return float(any(name.partition(".")[0] in ("jax", "jaxlib") for name in sys.modules))


def terminates_a_command(text: str, **known: Any) -> float:
    """Children react to SIGTERM, although the reward process ignores it."""
    os.kill(os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    return float(child.wait(timeout=240) == -signal.SIGTERM)


def backtracks(text: str, **known: Any) -> float:
    """Keeps the interpreter lock for hours, so that no other thread of the process runs."""
    return float(re.match(r"(a+)+$", "a" * 60 + "b") is not None)


def _note_pid(record: dict[str, Any], child: subprocess.Popen) -> subprocess.Popen:
    with open(record["pids"], "a") as file:
        file.write(f"{child.pid}\n")
    return child


def rank(texts: list[str], **known: Any) -> list[float]:
    """The share of the other texts that are shorter."""
    return [sum(len(text) > len(other) for other in texts) / (len(texts) - 1) for text in texts]


def known_lists(texts: list[str], *, prompts: list, answers: list, expected: list, records: list) -> list[float]:
    lists = [prompts, answers, expected, [record["level"] for record in records]]
    return [float(lists == [["x?"] * 2, texts, [3, 4], [2, 5]])] * len(texts)


def too_few(texts: list[str], **known: Any) -> list[float]:
    return [1.0] * (len(texts) - ("b" in texts))


def nan_at_b(texts: list[str], **known: Any) -> list[float]:
    return [float("nan") if text == "b" else 1.0 for text in texts]


def vowels_of_none(texts: list[str], **known: Any) -> None:
    pass


running = most_running = 0


async def concurrent(text: str, **known: Any) -> float:
    """The largest number of calls at a time so far; b never returns, and c raises."""
    global running, most_running
    running += 1
    most_running = max(most_running, running)
    try:
        await asyncio.sleep(600 if text == "b" else 0.05)
    finally:
        running -= 1
    if text == "c":
        raise RuntimeError("cannot judge c")
    return most_running


async def blocks(text: str, **known: Any) -> float:
    time.sleep(600)
    return 1.0


async def rank_later(texts: list[str], **known: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return rank(texts)
