"""Waiting for a condition that another process or thread brings about."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Return as soon as the condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds:.0f} s: {condition}"
        time.sleep(0.05)
