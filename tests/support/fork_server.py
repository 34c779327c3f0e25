"""A process that has imported everything a run needs, and forks itself for each command.

Imports take half the time of a short run, and the tests run hundreds of commands. A fork is an ordinary process: it has
the working directory, environment and streams of its client, and can be killed. It joins its threads and runs its exit
functions, but does not free its memory object by object, which would first copy the pages that it shares.

    python -m tests.support.fork_server NUMBER    serves a listening socket until its parent process ends
    python tests/support/fork_server.py SOCKET ARGUMENTS...    runs `maxhydra ARGUMENTS...`
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
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STREAMS = (0, 1, 2)
# File to which the server appends the CPU seconds of each command: tests/support/cpu_time.py.
TIMES_VARIABLE = "MAXHYDRA_COMMAND_TIMES"
# The `python` with which a command starts others: see write_python.
PYTHON_VARIABLE = "MAXHYDRA_COMMAND_PYTHON"


@functools.cache
def server_address(prefix: str) -> str:
    """Address of the server's socket, in a temporary folder with this prefix; the first call starts the server."""
    folder = tempfile.mkdtemp(prefix=prefix)
    address = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, "-m", "tests.support.fork_server", str(number)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "PYTHONPATH": path}
        # The server exits when its stdin closes, that is, when this process ends for any reason.
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, pass_fds=[number])
    atexit.register(shutil.rmtree, folder)
    atexit.register(process.communicate)
    return address


def write_script(path: Path, prefix: str) -> Path:
    """Write a script that acts as `maxhydra`."""
    return _write_executable(path, f'exec {_client(prefix)} "$@"\n')


@functools.cache
def write_python(prefix: str) -> Path:
    """Write a script that acts as `python`, but runs `python -m maxhydra` in the server."""
    path = Path(server_address(prefix)).with_name("python")
    is_maxhydra = '[ "$1 $2" = "-m maxhydra" ]'
    return _write_executable(
        path, f'if {is_maxhydra}; then shift 2; exec {_client(prefix)} "$@"; fi\nexec "{sys.executable}" "$@"\n'
    )


def _client(prefix: str) -> str:
    return f'"{sys.executable}" -I "{__file__}" "{server_address(prefix)}"'


def _write_executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


class Command:
    """A running command, in the style of subprocess.Popen."""

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        *,
        folder: str,
        environment: Mapping[str, str],
        streams: Sequence[int] = STREAMS,
        module: str = "maxhydra",
        ends_with_client: bool = False,
    ):
        """`ends_with_client`: kill the command when this process ends."""
        request = {"module": module, "arguments": list(arguments), "folder": folder, "environment": dict(environment)}
        request["ends_with_client"] = ends_with_client
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        socket.send_fds(self._connection, [b"\n"], list(streams))
        self._connection.sendall(json.dumps(request).encode())
        self._connection.shutdown(socket.SHUT_WR)
        self.pid = int(self._line())

    def is_running(self) -> bool:
        return not select.select([self._connection], [], [], 0)[0]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Exit code as in subprocess; kills the command and raises TimeoutError after `timeout` seconds."""
        self._connection.settimeout(timeout)
        with self._connection:
            try:
                return int(self._line())
            except TimeoutError:
                self.kill()
                raise

    def _line(self) -> str:
        """Read one line of the server's response, byte by byte, so that nothing after it is consumed."""
        text = b""
        while not text.endswith(b"\n"):
            text += self._connection.recv(1) or b"\n"
        return text.decode()


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Accept requests; returns only in a forked child, with its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        connection, _ = listener.accept()
        # A supervisor process waits for the command, so that this process can accept the next request.
        if os.fork() == 0:
            listener.close()
            return _supervise(connection)
        connection.close()


def _supervise(connection: socket.socket) -> dict[str, Any]:
    """Fork the command, report its pid and exit code to the client; returns only in the command's process."""
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
    if request["ends_with_client"]:
        _kill_after_client(process, connection)
    _, status, usage = os.wait4(process, 0)
    if TIMES_VARIABLE in os.environ:
        with open(os.environ[TIMES_VARIABLE], "a") as times:
            times.write(f"{usage.ru_utime + usage.ru_stime}\n")
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _kill_after_client(process: int, connection: socket.socket) -> None:
    """Return when the command has ended; kill it if the client ends first."""
    poll, end = select.poll(), os.pidfd_open(process)
    poll.register(end, select.POLLIN)
    # Reports only the end of the connection: the client has sent its whole request.
    poll.register(connection, 0)
    if end not in dict(poll.poll()):
        os.kill(process, signal.SIGKILL)
    os.close(end)


class _Replaced(BaseException):
    """Ends a command that calls exec to become another one."""

    def __init__(self, request: dict[str, Any]):
        self.request = request


def _become(request: dict[str, Any]) -> None:
    """Run the requested module as `python -m MODULE` would in that folder and environment."""
    exec_program = os.execve

    def execve(path: str, command: list[str], environment: Mapping[str, str]) -> None:
        """Run `python -m MODULE` in this process, which has imported it already, and any other program as usual."""
        if path != sys.executable or command[1] != "-m":
            exec_program(path, command, environment)
        _, _, module, *arguments = command
        raise _Replaced({"module": module, "arguments": arguments, "folder": os.getcwd(), "environment": environment})

    os.execve = execve  # type: ignore[assignment]
    path = sys.path[1:]
    while True:
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.executable = os.environ.get(PYTHON_VARIABLE, sys.executable)
        os.chdir(request["folder"])
        sys.path[:] = [request["folder"], *os.environ.get("PYTHONPATH", "").split(os.pathsep), *path]
        sys.argv = [request["module"], *request["arguments"]]
        try:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            return
        except _Replaced as replaced:
            request = replaced.request


def _prepare() -> None:
    """Do the work that all commands share: imports, a first composition and trace, the list of installed packages."""
    from jax.sharding import AbstractDevice, AbstractMesh

    from maxhydra import tasks
    from maxhydra.config.compose.composer import find_composer
    from maxhydra.config.schema.hardware import AXES
    from maxhydra.record import environment
    from maxhydra.runtime.detect import hardware_options
    from maxhydra.sharding import Sharder
    from maxhydra.sharding.mesh import AXIS_TYPES
    from maxhydra.train.compile import trace_pretraining_step
    from tests.support import compile_cache
    from tests.support.cli import SMALL

    task_modules = [f"tasks.{module.name}" for module in pkgutil.iter_modules(tasks.__path__)]
    for name in ("cli.hydra_app", "cli.run_job", "runs.report", *task_modules):
        importlib.import_module(f"maxhydra.{name}")
    # Parsed files are cached by the path shown in messages, which outside this repository is absolute.
    with contextlib.chdir(tempfile.gettempdir()):
        config = find_composer().check_overrides(SMALL).composed().config
    # Fills jax's caches. The mesh is abstract, because the threads of a backend would not survive a fork.
    device = AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu")
    mesh = AbstractMesh((1,) * len(AXES), AXES, axis_types=AXIS_TYPES, abstract_device=device)
    trace_pretraining_step(config, Sharder.from_config(config.mesh, mesh))
    hardware_options()
    environment()
    compile_cache.write_from_every_process()
    compile_cache.reduce_gc()


def _exit(code: int | str | None) -> None:
    """Exit as the interpreter does with the code of a SystemExit, without freeing memory first."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def _run_as_client(address: str, *arguments: str) -> None:
    """Run a command in the server and end as it ends; a launcher or scheduler knows only this process."""
    command = Command(address, arguments, folder=os.getcwd(), environment=os.environ, ends_with_client=True)
    for forwarded in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(forwarded, lambda number, _: command.signal(number))
    code = command.wait()
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _prepare()
        try:
            _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
        except SystemExit as error:
            _exit(error.code)
        _exit(None)
    else:
        _run_as_client(*sys.argv[1:])
