"""User-defined reward functions, valid and faulty, referenced by import path."""

import os
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
