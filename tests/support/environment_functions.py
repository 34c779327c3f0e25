"""User-defined environments, valid and failurey, referenced by import path."""

import fcntl
import os
import subprocess
import sys
import time
from typing import Any

Messages = list[dict[str, Any]]


class Echo:
    """Repeats the model's text, and rewards vowels; ends after the turn that contains `stop`."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, record: dict[str, Any]) -> Messages:
        return [{"role": "user", "content": f"say: {record['answer']}"}]

    def step(self, message: dict[str, Any]) -> tuple[Messages, float, bool]:
        self.turns += 1
        text = message["content"]
        reward = sum(text.count(vowel) for vowel in "aeiou")
        return [{"role": "user", "content": f"turn {self.turns}"}], reward, "stop" in text


class Faulty(Echo):
    """Fails in the first step, in the way that the model or the record names."""

    def failure_of(self, message: dict[str, Any]) -> str:
        return str(message["content"])

    def step(self, message: dict[str, Any]) -> Any:
        failure = self.failure_of(message)
        if failure == "hangs":
            time.sleep(600)
        if failure == "raises":
            raise RuntimeError("no such move")
        if failure == "exits":
            os._exit(3)
        if failure == "allocates":
            bytearray(8 << 30)
        if failure == "scores":
            self.scores = {"points": "many"}
            return [], 0, True
        if failure == "starts":
            with open(os.environ["PIDS"], "a") as file:
                file.write(f"{subprocess.Popen(['sleep', '600'], start_new_session=True).pid}\n")
            time.sleep(600)
        if failure == "kills":
            os.kill(os.getppid(), 9)
            time.sleep(600)
        invalid = {
            "none": None,
            "pair": ([], 1.0),
            "reward": ([{"role": "user", "content": "a"}], float("nan"), False),
            "number": ([{"role": "user", "content": "a"}], "much", False),
            "role": ([{"role": "assistant", "content": "a"}], 0, False),
            "content": ([{"role": "user", "content": 3}], 0, False),
            "object": ([{"role": "user", "content": object()}], 0, False),
            "silence": ([], 0, False),
            "special": ([{"role": "user", "content": "<|end|>"}], 0, False),
        }
        return invalid[failure] if failure in invalid else super().step(message)


class TwelveOf64(Faulty):
    """Of the first 64 episodes 4 hang, 4 crash and 4 reply nonsense; tickets are counted in a file."""

    def failure_of(self, message: dict[str, Any]) -> str:
        with open(os.environ["TICKETS"], "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            ticket = os.fstat(file.fileno()).st_size
            file.write(b".")
        return ("hangs", "exits", "none")[ticket // 4] if ticket < 12 else ""


def join(first: str, *, count: int = 1) -> Any:
    """Repeats a text.

    The second paragraph is not part of the description.
    """
    return {"text": first * count} if first else sys.nothing  # type: ignore[attr-defined]
