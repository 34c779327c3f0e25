"""Processes of environments, and their supervisor: environments are user code that may hang, crash or reply nonsense.

    run -- supervisor -- one process per episode (user code) -- whatever it starts

The supervisor imports the environment once and forks a process at each reset, so that an episode starts without the
state of earlier ones. It waits for all of them at the same time. A process that hangs, crashes or writes something else
than a reply is killed with everything that it has started, and costs its own episode only. All of them end when the run
closes the lifeline or dies.
"""

import contextlib
import dataclasses
import gc
import json
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from maxhydra.config.schema.reward import Environment as Config
from maxhydra.record import processes
from maxhydra.rl.environments import Environment, load_environment
from maxhydra.rl.reward_process import LoadFailure, describe_error, isolate_process, reply_sender

# Bytes of the longest reply.
MAX_REPLY = 1 << 20
# Seconds between searches for processes that have left the process tree of their episode.
SWEEP_INTERVAL = 1.0

HANGS, CRASHES, INVALID = FAILURES = ("hangs", "crashes", "invalid")
RESET, STEP, END = "reset", "step", "end"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an episode cannot continue: one of FAILURES, and the reason."""

    kind: str
    reason: str


@dataclasses.dataclass
class _Episode:
    """The process of an episode, as seen from its supervisor."""

    pid: int
    socket: socket.socket
    outgoing: bytes = b""
    incoming: bytes = b""
    deadline: float | None = None
    """Time by which the call in progress must be answered."""


def supervise(pipe: Connection, lifeline: Connection, config: Config) -> None:
    """Main of the supervisor: reply None once the environment is loaded, then serve calls until the run ends.

    A call is (slot, name, argument); its reply is (slot, JSON value or Failure). A slot has one episode at a time.
    """
    # In its own session, a kill of the run's process group leaves the supervisor time to clean up.
    os.setsid()
    processes.ignore_run_signals()
    processes.adopt_orphans()
    try:
        try:
            factory = load_environment(config)
        except Exception as error:  # an import may raise anything
            pipe.send(LoadFailure(config.kind.value, f"cannot be loaded: {describe_error(error)}"))
            return
        # Objects that exist now are shared by all episodes.
        gc.collect()
        gc.freeze()
        pipe.send(None)
        _Supervisor(pipe, lifeline, factory, config).serve()
    except (EOFError, ConnectionError):
        pass  # the run has ended
    except OSError as error:
        print(f"maxhydra: the supervisor of environments failed: {error}", file=sys.stderr, flush=True)
    finally:
        processes.kill_descendants()


class _Supervisor:
    def __init__(self, pipe: Connection, lifeline: Connection, factory: Callable[[], Environment], config: Config):
        self._pipe, self._lifeline, self._factory, self._config = pipe, lifeline, factory, config
        self._episodes: dict[int, _Episode] = {}
        self._next_sweep = 0.0

    def serve(self) -> None:
        while True:
            ready = self._wait()
            if self._lifeline.fileno() in ready:
                return
            if self._pipe.fileno() in ready:
                self._start_call(*self._pipe.recv())
            for slot, episode in list(self._episodes.items()):
                try:
                    if episode.deadline is not None and episode.socket.fileno() in ready:
                        self._exchange(slot, episode)
                    elif episode.deadline is not None and time.monotonic() > episode.deadline:
                        raise _Broken(HANGS, f"exceeded environment.timeout={self._config.timeout:g} s")
                except _Broken as broken:
                    self._end(slot)
                    self._pipe.send((slot, Failure(*broken.args)))
            self._sweep()

    def _wait(self) -> set[int]:
        """Descriptors that are ready, after at most the time to the next deadline."""
        poll = select.poll()
        for connection in (self._pipe, self._lifeline):
            poll.register(connection.fileno(), select.POLLIN)
        wake = time.monotonic() + SWEEP_INTERVAL
        for episode in self._episodes.values():
            if episode.deadline is not None:
                poll.register(episode.socket, select.POLLIN | (select.POLLOUT if episode.outgoing else 0))
                wake = min(wake, episode.deadline)
        return {descriptor for descriptor, _ in poll.poll(max(0.0, wake - time.monotonic()) * 1000 + 1)}

    def _start_call(self, slot: int, name: str, argument: Any) -> None:
        if name in (RESET, END):
            self._end(slot)
        if name == END:
            return
        if name == RESET:
            self._episodes[slot] = self._fork()
        episode = self._episodes.get(slot)
        if episode is None:
            self._pipe.send((slot, Failure(CRASHES, "has ended before its episode")))
            return
        episode.outgoing = pickle.dumps((name, argument))
        episode.incoming, episode.deadline = b"", time.monotonic() + self._config.timeout

    def _fork(self) -> _Episode:
        own_end, child_end = socket.socketpair()
        # The supervisor has a single thread, unless importing the environment has started others.
        pid = os.fork()
        if not pid:
            _serve_episode(child_end, self._factory, self._config)
        child_end.close()
        own_end.setblocking(False)
        return _Episode(pid, own_end)

    def _exchange(self, slot: int, episode: _Episode) -> None:
        """Send the rest of a call, and receive the available part of its reply."""
        received: bytes | None = None
        try:
            if episode.outgoing:
                episode.outgoing = episode.outgoing[episode.socket.send(episode.outgoing) :]
            received = episode.socket.recv(MAX_REPLY)
        except BlockingIOError:
            pass  # nothing more at the moment
        except OSError:
            received = b""
        if received == b"":
            raise _Broken(CRASHES, "crashed its process")
        episode.incoming += received or b""
        if len(episode.incoming) > MAX_REPLY:
            raise _Broken(INVALID, f"replied with more than {MAX_REPLY} bytes")
        if not episode.incoming.endswith(b"\n"):
            return
        try:
            reply = json.loads(episode.incoming)["reply"]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise _Broken(INVALID, "wrote to the pipe of its process, which carries the replies") from None
        if set(reply) == {"failure"}:
            raise _Broken(*reply["failure"])
        episode.deadline = None
        self._pipe.send((slot, reply))

    def _end(self, slot: int) -> None:
        """Kill the process of an episode, and everything that it has started."""
        if (episode := self._episodes.pop(slot, None)) is None:
            return
        episode.socket.close()
        _kill_tree(episode.pid)
        processes.reap_children()

    def _sweep(self) -> None:
        """Kill processes whose parent has exited: they have left the process tree of their episode."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_INTERVAL
        processes.reap_children()
        for pid in _children(os.getpid()) - {episode.pid for episode in self._episodes.values()}:
            _kill_tree(pid)


class _Broken(Exception):
    """The process of an episode must end; arguments of a Failure."""


def _children(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return set()


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants; one that escapes becomes a child of this process, which `_sweep` kills."""
    pids = [pid, *(processes.descendants(pid) if _children(pid) else ())]
    # Stopped first, so that they do not fork meanwhile.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in pids:
            processes.send_signal(each, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _serve_episode(connection: socket.socket, factory: Callable[[], Environment], config: Config) -> None:
    """Main of the process of an episode, which never returns: reply to each call."""
    try:
        descriptor = isolate_process(connection, config.memory_limit_gib)
        send = reply_sender(descriptor)
        environment: Environment | None = None
        with open(descriptor, "rb", closefd=False) as calls:
            while True:
                name, argument = pickle.load(calls)
                try:
                    environment = factory() if environment is None else environment
                    reply = _reset(environment, argument) if name == RESET else _step(environment, argument)
                except _Broken as broken:
                    reply = {"failure": broken.args}
                except MemoryError:
                    reason = f"exceeded environment.memory_limit_gib={config.memory_limit_gib}"
                    reply = {"failure": (CRASHES, reason)}
                except Exception as error:  # user code may raise anything; the run reports it
                    reply = {"failure": (CRASHES, f"raised {describe_error(error)}")}
                try:
                    send(reply)
                except (TypeError, ValueError, RecursionError) as error:
                    send({"failure": (INVALID, f"returned values that are not JSON: {error}")})
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _reset(environment: Environment, record: dict[str, Any]) -> dict[str, Any]:
    messages = environment.reset(record)
    return {"messages": messages, "tools": getattr(environment, "tools", None)}


def _step(environment: Environment, message: dict[str, Any]) -> dict[str, Any]:
    result = environment.step(message)
    if not isinstance(result, tuple) or len(result) != 3:
        raise _Broken(INVALID, f"returned {result!r:.200} instead of (messages, reward, done)")
    try:
        # NumPy scalars count as numbers.
        reply = {"messages": result[0], "reward": float(result[1]), "done": bool(result[2])}
    except (TypeError, ValueError):
        raise _Broken(INVALID, f"returned the reward {result[1]!r:.200}, not a number") from None
    scores = getattr(environment, "scores", None)
    if not reply["done"] or not scores:
        return reply
    try:
        return {**reply, "scores": {str(name): float(value) for name, value in scores.items()}}
    except (AttributeError, TypeError, ValueError):
        raise _Broken(INVALID, f"has the scores {scores!r:.200}, not numbers by name") from None
