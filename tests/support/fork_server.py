"""A process that has imported what a run imports, and forks itself for each command.

Half of a short run are imports, and the tests give hundreds of commands. A fork is a process like any other: it has the
folder, the environment and the streams of the one who asks, can be killed, and leaves by the usual way out.

    python -m tests.support.fork_server NUMBER    serves a listening socket until its parent process ends
    python tests/support/fork_server.py SOCKET ARGUMENTS...    `maxhydra ARGUMENTS...`
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STREAMS = (0, 1, 2)


@functools.cache
def server(prefix: str) -> str:
    """Where commands are taken, in a folder of that name; the first that asks starts it."""
    folder = tempfile.mkdtemp(prefix=prefix)
    address = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        number = listener.fileno()
        words = [sys.executable, "-m", "tests.support.fork_server", str(number)]
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        # It ends when its input does, and so with this process, however that ends.
        process = subprocess.Popen(words, cwd=ROOT, env=own, stdin=subprocess.PIPE, pass_fds=[number])
    atexit.register(shutil.rmtree, folder)
    atexit.register(process.communicate)
    return address


def program(path: Path, prefix: str, *, skipped: int = 0) -> Path:
    """A script that is `maxhydra`, less so many words before its arguments."""
    words = f'"{sys.executable}" -I "{__file__}" "{server(prefix)}"'
    path.write_text(f'#!/bin/sh\nshift {skipped}\nexec {words} "$@"\n')
    path.chmod(0o755)
    return path


class Command:
    """One that runs; what it leaves is in its folder and behind its streams."""

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        *,
        folder: str,
        environment: Mapping[str, str],
        streams: Sequence[int] = STREAMS,
        module: str = "maxhydra",
    ):
        request = {"module": module, "arguments": list(arguments), "folder": folder, "environment": dict(environment)}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        socket.send_fds(self._connection, [b"\n"], list(streams))
        self._connection.sendall(json.dumps(request).encode())
        self._connection.shutdown(socket.SHUT_WR)
        self.pid = int(self._line())

    def runs(self) -> bool:
        return not select.select([self._connection], [], [], 0)[0]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code as subprocess tells it; TimeoutError where it takes longer, and then it is killed."""
        self._connection.settimeout(timeout)
        with self._connection:
            try:
                return int(self._line())
            except TimeoutError:
                self.kill()
                raise

    def _line(self) -> str:
        """An answer. They come one by one, and nothing is read ahead of what is asked for."""
        text = b""
        while not text.endswith(b"\n"):
            text += self._connection.recv(1) or b"\n"
        return text.decode()


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Returns in a fork, with what is asked of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        connection, _ = listener.accept()
        # A fork that minds the command leaves this process free for the next.
        if os.fork() == 0:
            listener.close()
            return _minded(connection)
        connection.close()


def _minded(connection: socket.socket) -> dict[str, Any]:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
    with connection.makefile("r") as text:
        request = json.load(text)
    process = os.fork()
    if process == 0:
        connection.close()
        for stream, number in zip(streams, STREAMS, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        return request
    connection.sendall(f"{process}\n".encode())
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """What `python -m MODULE` would find in that folder and environment."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [request["folder"], *given, *sys.path[1:]]
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _prepare() -> None:
    """What every command would do again: imports, a first composition, a look at what is installed."""
    from maxhydra import tasks
    from maxhydra.config.compose.composer import compose
    from maxhydra.record import environment
    from maxhydra.runtime.hardware_options import hardware_options
    from tests.support import compile_cache as compiling

    named = [f"tasks.{module.name}" for module in pkgutil.iter_modules(tasks.__path__)]
    for name in ("cli.hydra_app", "cli.run_job", "runs.report", *named):
        importlib.import_module(f"maxhydra.{name}")
    compose([])
    hardware_options()
    environment()
    compiling.cycles_are_rare()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _prepare()
        _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
    else:
        command = Command(sys.argv[1], sys.argv[2:], folder=os.getcwd(), environment=os.environ)
        # A scheduler knows this process alone.
        for told in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(told, lambda number, _: command.signal(number))
        sys.exit(command.wait())
