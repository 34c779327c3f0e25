"""Kill a process at a chosen point of an action: just before its n-th call of a C function.

Every effect on disk is a call of a C function, so that all states that a kill can leave behind are reached, each by a
number that can be repeated; a timer would reach most of them only by chance.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

Action = Callable[[], object]


def count_calls(action: Action) -> int:
    """Number of C functions that an action calls, in a child process: it may leave files behind."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, str(_run(action, None)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        count = result.read()
    assert os.waitpid(pid, 0)[1] == 0, "the action failed"
    return int(count)


def kill_at(action: Action, number: int) -> bool:
    """Run an action in a child process that is killed before its call `number` (from 1); False if it ended before."""
    pid = os.fork()
    if not pid:
        _run(action, number)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0, "the action failed"
    return False


def _run(action: Action, number: int | None) -> int:
    """Main of the child process."""
    calls = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "c_call":
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.setprofile(profile)
        action()
        sys.setprofile(None)
    except BaseException:
        sys.setprofile(None)
        traceback.print_exc()
        os._exit(1)
    return calls
