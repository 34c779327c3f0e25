"""Kill a process at a chosen point of an action: just before its n-th call with an effect on disk.

All states that a kill can leave behind are reached, each by a number that can be repeated; a timer would reach most of
them only by chance.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

Action = Callable[[], object]
# Modules whose C functions, or whose objects' methods, have effects on disk.
_MODULES = ("posix", "_io", "fcntl", "sqlite3", "_sqlite3", "array_record")


def count_calls(action: Action) -> int:
    """Number of calls with effects that an action makes, in a child process: it may leave files behind."""
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
        if event == "c_call" and _has_effect(argument):
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


def _has_effect(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    modules = (getattr(function, "__module__", None), type(owner).__module__, getattr(owner, "__name__", None))
    return any(str(module).split(".")[0] in _MODULES for module in modules)
