"""Liveness of the processes of a run, and their agreement on the step at which a signal ends it.

Process 0 listens, and every other process holds a connection to it over which both sides send a message per second. The
kernel closes the connections of a process that is killed, so that its death is known at once; a stopped process or a
lost host is known by its silence. All other processes then name it, record the run as failed and end with
EXIT_LOST, with which launchers restart a job: without the missing process no collective operation could complete.
A process that ends with an error sends it first, and the others repeat it; if it is about the config, all exit with 2.
If its task fails without one, as when memory is full, the others end unless their tasks do within FAILURE_SECONDS.

jax.distributed has a similar service, but it ends the process from C++ without a reason (`exits.delay_aborts`), and its
handler of SIGTERM hides a second SIGTERM. A process has one state, like `signals`; with a single process all functions
do nothing.
"""

import atexit
import contextlib
import json
import logging
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import distributed

from maxhydra.config.schema.hardware import Distributed
from maxhydra.runtime.agreement import StopAgreement
from maxhydra.runtime.channel import NO_ERROR, Connection, Message, coordinator_host, open_server
from maxhydra.runtime.exits import (
    EXIT_LOST,
    REPORT_SECONDS,
    delay_aborts,
    describe_error,
    exit_at_once,
    exit_with_reason,
)

BEAT_SECONDS = 1.0
# Silence after which a warning names a process.
WARN_SECONDS = 10.0
# Time in which the death of a process is noticed if an error of a collective operation is noticed first.
CAUSE_SECONDS = 5.0
# Time in which all processes end a task that fails in all of them: process 0 may have to finish uploads.
FAILURE_SECONDS = 60.0
KEY = "maxhydra/peers"

log = logging.getLogger("maxhydra")


class _LastLine(logging.Handler):
    """Keeps the last line that was logged."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:200]


class _Peers:
    """The connections of this process: to all others in process 0, otherwise to process 0."""

    def __init__(self, index: int, count: int, silence_seconds: float):
        self.index, self.count = index, count
        self.step = 0
        self.record: Callable[[str], None] | None = None
        self.write_stacks: Callable[[str], None] | None = None
        self.is_lost, self.has_left = threading.Event(), False
        self.is_exiting, self.exit_code = False, 0
        """Whether the main thread has ended, and with which exit code."""
        self._silence_seconds, self._started_at = silence_seconds, time.monotonic()
        self.last = _LastLine()
        self._has_failed = self._has_ended_task = False
        self._num_tasks = 0
        """Tasks that this process has begun."""
        self._loss = "", EXIT_LOST
        """Why this process was to end, and with which exit code."""
        self._connections: dict[int, Connection] = {}
        self._agreement = StopAgreement()

    def run(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def listen(self, server: socket.socket, token: str) -> None:
        """Process 0: accept and serve the others."""
        self.run("peers", lambda: self._serve(server, token))

    def connect(self, address: tuple[str, int], token: str, timeout: float) -> None:
        """The other processes: connect to process 0."""
        connection = Connection(socket.create_connection(address, timeout), 0, address[0])
        connection.send(token=token, index=self.index, host=socket.gethostname())
        self._connections = {0: connection}
        self.run("peers", self._serve)

    def _serve(self, server: socket.socket | None = None, token: str = "") -> None:
        selector = selectors.DefaultSelector()
        if server is not None:
            selector.register(server, selectors.EVENT_READ)
        for connection in self._connections.values():
            selector.register(connection.link, selectors.EVENT_READ, connection)
        next_beat = time.monotonic()
        while not self.is_lost.is_set():
            for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                if key.data is None:
                    link, _ = server.accept() if server is not None else (None, None)
                    if link is not None:
                        link.settimeout(BEAT_SECONDS)
                        selector.register(link, selectors.EVENT_READ, Connection(link))
                elif not self._read(key.data, token):
                    selector.unregister(key.data.link)
                    key.data.link.close()
            if (late := time.monotonic() - next_beat) >= 0:
                next_beat = time.monotonic() + BEAT_SECONDS
                self._beat(was_stopped=late > WARN_SECONDS / 2)

    def _read(self, connection: Connection, token: str) -> bool:
        """Handle the messages of a connection; False if it is closed."""
        messages = connection.receive()
        if connection.index < 0 and messages is not None:
            # The first message of a new connection must contain the token, which only the processes of the run know.
            if not messages:
                return True
            hello = messages.pop(0)
            if not secrets.compare_digest(str(hello.get("token")), token):
                return False
            connection.index, connection.host = int(hello["index"]), str(hello["host"])[:100]
            self._connections[connection.index] = connection
        for message in messages or ():
            self._handle(connection, message)
        if messages is None and connection.index >= 0:
            connection.is_closed = True
            if not connection.has_left or connection.num_tasks < self._num_tasks:
                self.lose(*connection.loss)
        return messages is not None

    def _handle(self, connection: Connection, message: Message) -> None:
        connection.step = message.get("step", connection.step)
        connection.line = message.get("line", connection.line)
        connection.host = message.get("host", connection.host)
        if "joined" in message:
            connection.has_left, connection.error = False, NO_ERROR
        if "left" in message:
            # With an error it does not wait for the others at exit.
            connection.has_left, connection.num_tasks = message["left"] is None, message["task"]
            if message["left"] is not None:
                connection.error = f"{connection} ended: {message['left']}", message["code"]
                if not self.has_left:
                    self.lose(*connection.error)
        if "lost" in message:
            self.lose(message["lost"], message["code"])
        if "failed" in message:
            reason = f"{connection} ended: {message['failed']}"
            timer = threading.Timer(FAILURE_SECONDS, self._end_task_with, args=(reason, message["task"]))
            timer.daemon = True
            timer.start()
        if "signal" in message:
            self.request_stop(message["signal"])
        if "stacks" in message:
            self.request_stacks(message["stacks"], sender=connection)
        if "call" in message:
            self._collect(connection.index, message["call"])
        if "stop_at" in message:
            self._agreement.decide(message["stop_at"])

    def _beat(self, *, was_stopped: bool) -> None:
        """Send a message to the others, and look for silent ones, unless this process itself was stopped."""
        self._started_at = time.monotonic() if was_stopped else self._started_at
        missing = set(range(1, self.count)) - self._connections.keys() if self.index == 0 else ()
        if missing and not self.has_left and time.monotonic() - self._started_at > self._silence_seconds:
            # It has reached jax.distributed, and has ended since.
            self.lose(f"process {min(missing)} has not connected for {self._silence_seconds:.0f} s")
        for connection in list(self._connections.values()):
            connection.heard_at = time.monotonic() if was_stopped else connection.heard_at
            connection.send(step=self.step, line=self.last.text, host=socket.gethostname())
            if connection.has_left:
                continue
            silent = f"{connection} has not responded for {connection.silence:.0f} s"
            if connection.silence > self._silence_seconds:
                self.lose(f"{silent}; {connection.describe_last()}")
            elif connection.silence > WARN_SECONDS and not connection.is_warned and not self.has_left:
                connection.is_warned = True
                log.warning("%s; the run ends after %.0f s", silent, self._silence_seconds)

    def request_stacks(self, reason: str, sender: Connection | None = None) -> None:
        """Ask all processes, and this one if another asks, to write their Python stacks. Process 0 passes it on."""
        for connection in self._connections.values():
            if connection is not sender:
                connection.send(stacks=reason)
        if sender is not None and self.write_stacks is not None:
            self.write_stacks(reason)

    def lose(self, reason: str, code: int = EXIT_LOST) -> None:
        """End this process because of another one or a hang of all, after notifying the others.

        If it has left, it completes its own work first, and does not begin another task.
        """
        if self.is_lost.is_set():
            return
        self._loss = reason, code
        self.is_lost.set()
        for connection in self._connections.values():
            connection.send(lost=reason, code=code)
        if not self.has_left:
            exit_with_reason(reason, self.record, code=code)
        elif self.is_exiting:
            exit_at_once(self.exit_code)

    def exit(self, error: BaseException | None) -> None:
        """Called at exit, before jax.distributed waits there for all processes.

        It would abort if one is lost, so this process ends at once if that happens before or later, or if it failed
        itself, since the others end then.
        """
        self.leave(error)
        self.is_exiting = True
        if self.is_lost.is_set() or self._has_failed:
            exit_at_once(self.exit_code)

    def join(self) -> None:
        """Begin another task of the same processes."""
        self.exit_code = 0
        self._num_tasks += 1
        self.has_left = self._has_failed = self._has_ended_task = False
        for connection in self._connections.values():
            connection.send(joined=True)
            if connection.is_closed:
                self.lose(*connection.loss)
        if self.is_lost.is_set():
            reason, code = self._loss
            exit_with_reason(reason, None, code=code)

    def end_task(self, failure: str | None) -> None:
        """Notify the others if the task of this process has failed, perhaps without theirs."""
        self._has_ended_task = True
        if failure is not None:
            for connection in self._connections.values():
                connection.send(failed=failure[:4000], task=self._num_tasks)

    def _end_task_with(self, reason: str, task: int) -> None:
        """End the task with this number, unless it has ended."""
        if task == self._num_tasks and not self._has_ended_task:
            self.lose(reason, 1)

    def leave(self, error: BaseException | None) -> None:
        """Notify the others, once, of how this process ends, which decides their exit codes."""
        if self.has_left:
            return
        self.has_left = True
        text, code = describe_error(error)
        self._has_failed = isinstance(error, Exception)
        if self._has_failed:
            self.exit_code = code
        for connection in self._connections.values():
            connection.send(left=text, code=code, task=self._num_tasks)

    def request_stop(self, number: int) -> None:
        """Ask all processes to end at the same call of `reached_stop`, because this one received a signal."""
        if self._agreement.request(number):
            for connection in self._connections.values():
                connection.send(signal=number)
            if self.index == 0 or 0 in self._connections:
                self._agreement.report(self._report_call)

    def reached_stop(self) -> int | None:
        """The signal to end with, if this call is the one that all processes agreed on; a collective call."""
        return self._agreement.reached(self._report_call)

    def _report_call(self, call: int) -> None:
        if self.index == 0:
            self._collect(0, call)
        else:
            self._connections[0].send(call=call)

    def _collect(self, index: int, call: int) -> None:
        """Process 0: once every process has reported its call, all end at the latest of these calls."""
        if (stop_at := self._agreement.collect(index, call, self.count)) is not None:
            for connection in self._connections.values():
                connection.send(stop_at=stop_at)
            self._agreement.decide(stop_at)


_active: _Peers | None = None
_record: Callable[[str], None] | None = None


def start(settings: Distributed) -> None:
    """Connect the processes. jax.distributed must be initialized: its store passes on the address and a token."""
    global _active
    state: Any = distributed.global_state
    client, index, count = state.client, state.process_id, state.num_processes
    if count == 1:
        return
    delay_aborts()
    host = coordinator_host(state)
    peers = _Peers(index, count, settings.silence_seconds)
    if index == 0:
        server = open_server(host, backlog=count)
        token = secrets.token_hex(16)
        peers.listen(server, token)
        client.key_value_set(KEY, json.dumps([server.getsockname()[1], token]))
    else:
        try:
            port, token = json.loads(client.blocking_key_value_get(KEY, settings.timeout_seconds * 1000))
            peers.connect((host, port), token, settings.timeout_seconds)
        except (RuntimeError, OSError):
            exit_with_reason(f"process 0 on {host} is gone; it has not accepted connections", None, code=EXIT_LOST)
    log.addHandler(peers.last)
    # The error is that of programs without membership().
    atexit.register(lambda: peers.exit(getattr(sys, "last_value", None)))
    _active = peers


@contextlib.contextmanager
def membership() -> Iterator[None]:
    """Notify the other processes of how this one ends."""
    if _active is not None:
        _active.join()
    try:
        yield
    except BaseException as error:
        if _active is not None:
            _active.leave(error)
        raise
    if _active is not None:
        _active.leave(None)


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Give way to the report of a lost process: its death is the likely cause of an error of jax inside."""
    try:
        yield
    except RuntimeError:
        if _active is not None and _active.is_lost.wait(CAUSE_SECONDS):
            time.sleep(2 * REPORT_SECONDS)  # the thread that noticed it ends the process
        raise


def set_exit_code(code: int) -> None:
    """State the exit code of a process whose task has ended, in case that it cannot wait for the others."""
    if _active is not None:
        _active.exit_code = code


def attach_run(record: Callable[[str], None]) -> None:
    """Call `record(reason)` when another process is lost, or before `end_run` ends this one."""
    global _record
    _record = record
    if _active is not None:
        _active.record = record


def attach_stacks(write: Callable[[str], None]) -> None:
    """Call `write(reason)` when another process asks for the Python stacks of all."""
    if _active is not None:
        _active.write_stacks = write


def request_stacks(reason: str) -> None:
    """Ask the other processes to write their Python stacks."""
    if _active is not None:
        _active.request_stacks(reason)


def end_run(reason: str) -> None:
    """Record the run as failed and end all of its processes with EXIT_LOST; any thread may call this."""
    if _active is not None:
        _active.lose(reason)
    else:
        exit_with_reason(reason, _record, code=EXIT_LOST)


def end_task(failure: str | None) -> None:
    """State that the task of this process has ended, and why it has failed, which ends that of the others too."""
    if _active is not None:
        _active.end_task(failure)


def report_step(step: int) -> None:
    """Let the others know the step of this process."""
    if _active is not None:
        _active.step = step


def request_stop(number: int) -> None:
    """Ask all processes to end because this one received a signal."""
    if _active is not None:
        _active.request_stop(number)


def reached_stop() -> int | None:
    """The signal to end with, once all processes are to end; a collective call that all make equally often."""
    return None if _active is None else _active.reached_stop()
