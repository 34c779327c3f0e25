"""A reward process and its supervisor: reward code is user code that may hang, crash, fork or write anywhere.

    run -- supervisor (this module, no user code) -- reward process (user code) -- whatever it starts

The reward process computes one term of one unit of completions at a time, or of several units concurrently. The
supervisor enforces the time limit of each call, and replaces a process that hangs, crashes or sends something else than
a result, together with everything that it has started. It ends, with all of them, when the run closes its lifeline or
dies.
"""

import asyncio
import contextlib
import json
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from maxhydra.config.schema.reward import Reward, Term
from maxhydra.record import processes
from maxhydra.rl.rewards import Sample, UnitScore, build_unit_score, units_at_a_time

# Seconds for a process to import the reward functions.
START_TIMEOUT = 120.0
# Times that a term may hang or crash in one call before it is skipped for the rest of the batch.
MAX_FAILURES = 3
# Seconds between searches for processes that a finished call has left behind.
SWEEP_INTERVAL = 1.0
# Bytes of the longest reply for a sample: a number, or a reason on one line.
MAX_REPLY = 1 << 14
# Seconds that concurrent calls may take beyond their time limits, each of which the reward process enforces.
GRACE = 1.0

CRASHED = "crashed its process"
CORRUPTED = "wrote to the pipe of its process, which carries the results"

Score = float | str
"""The value of a term, or the reason why it failed."""
Unit = Sequence[Sample]
Call = tuple[str, Sequence[Unit]]
"""The name of a term and the units that it scores."""


class SupervisorLink:
    """A supervisor process and its pipe, as seen from the run; `target(pipe, lifeline, config)` is its main."""

    def __init__(self, target: Callable[[Connection, Connection, Any], None], config: Any):
        self.pipe, child_pipe = processes.spawn_context.Pipe()
        child_lifeline, self._lifeline = processes.spawn_context.Pipe(duplex=False)
        self._process = processes.spawn_context.Process(
            target=target, args=(child_pipe, child_lifeline, config), daemon=True
        )
        self._process.start()
        child_pipe.close()
        child_lifeline.close()

    def stop(self) -> None:
        """Close the lifeline: the supervisor then kills everything that user code has started."""
        self._lifeline.close()
        self._process.join(2 * processes.KILL_TIMEOUT)
        self._process.kill()
        self._process.join()


class RunEnded(Exception):
    """The run has closed the lifeline, or died."""


class RewardProcessFailure(Exception):
    """The reward process must be replaced."""


class LoadFailure(Exception):
    """A term that cannot be loaded, and the reason."""

    def __init__(self, term: str, reason: str):
        super().__init__(term, reason)
        self.term, self.reason = term, reason


def supervise(pipe: Connection, lifeline: Connection, reward: Reward) -> None:
    """Main of the supervisor: reply None once the terms are loaded, then score calls until the run ends.

    A term that cannot be loaded is replied as LoadFailure.
    """
    # In its own session, a kill of the run's process group leaves the supervisor time to clean up.
    os.setsid()
    processes.ignore_run_signals()
    processes.adopt_orphans()
    process = _RewardProcess(reward, lifeline)
    try:
        process.start()
        pipe.send(None)
        while True:
            while not (ready := wait([pipe, lifeline], SWEEP_INTERVAL)):
                process.sweep()
            if lifeline in ready:
                return
            pipe.send(_score_calls(process, pipe.recv(), reward))
    except LoadFailure as failure:
        pipe.send(failure)
    except (RunEnded, EOFError, ConnectionError):
        pass  # the run has ended
    except OSError as error:
        # Such as a limit of processes. The run sees only that its supervisor has gone.
        print(f"maxhydra: the supervisor of a reward process failed: {error}", file=sys.stderr, flush=True)
    finally:
        processes.kill_descendants()


def _score_calls(process: "_RewardProcess", calls: Sequence[Call], reward: Reward) -> list[list[Score]]:
    """For each unit of each call, in order, the score of each sample or the reason why it failed."""
    return [scores for term, units in calls for scores in _score_units(process, term, units, reward)]


def _score_units(process: "_RewardProcess", term: str, units: Sequence[Unit], reward: Reward) -> list[list[Score]]:
    """Units of a concurrent term are one call, others one call each."""
    is_concurrent = reward.terms[term].concurrency is not None
    scores: list[list[Score]] = []
    failures = 0
    for part in ([units] if units else []) if is_concurrent else [[unit] for unit in units]:
        if failures == MAX_FAILURES:
            reason: Score = f"was skipped after {MAX_FAILURES} hangs or crashes in a batch"
        else:
            try:
                scores += process.call((term, part))
                continue
            except RewardProcessFailure as failure:
                reason = str(failure)
                failures += 1
                process.start()
        scores += [[reason] * len(unit) for unit in part]
    return scores


class _RewardProcess:
    """The reward process, as seen from its supervisor."""

    def __init__(self, reward: Reward, lifeline: Connection):
        self._reward, self._lifeline = reward, lifeline
        self._socket: socket.socket | None = None
        self._pid = 0
        self._helpers: set[int] = set()
        """The process itself, and those that importing the reward functions has started."""
        self._next_sweep = 0.0

    def start(self) -> None:
        """Start the process, in place of the current one; raises LoadFailure."""
        self._stop()
        self._socket, child_end = socket.socketpair()
        # The supervisor has a single thread, and has imported nothing that a fork could break.
        self._pid = os.fork()
        if not self._pid:
            _serve(child_end, self._reward)
        child_end.close()
        self._socket.setblocking(False)
        try:
            problem = self._receive("did not load within ", START_TIMEOUT, START_TIMEOUT)
        except RewardProcessFailure as failure:
            raise LoadFailure(next(iter(self._reward.terms)), str(failure)) from None
        if problem is not None:
            raise LoadFailure(*problem)
        self._helpers = set(processes.descendants())

    def call(self, call: Call) -> list[list[Score]]:
        """The scores of the samples of each unit; RewardProcessFailure if the process has to end."""
        self.sweep()
        term, units = call
        sizes = [len(unit) for unit in units]
        seconds = call_seconds(self._reward.terms[term], sizes, self._reward.timeout)
        self._send(pickle.dumps(call))
        reply = self._receive(
            "exceeded reward.timeout=", self._reward.timeout, seconds, max_bytes=MAX_REPLY * sum(sizes)
        )
        if not _is_scores(reply, sizes):
            raise RewardProcessFailure(CORRUPTED)
        scores: list[list[Score]] = reply
        return scores

    def sweep(self) -> None:
        """Kill what earlier calls have left behind, once it is older than the time limit of a call."""
        processes.reap_children()
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_INTERVAL
        for pid, age in processes.descendants().items():
            if pid not in self._helpers and age > self._reward.timeout:
                processes.send_signal(pid, signal.SIGKILL)

    def _stop(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            processes.kill_descendants()
        if self._socket is not None:
            self._socket.close()

    def _send(self, content: bytes) -> None:
        assert self._socket is not None
        deadline = time.monotonic() + self._reward.timeout
        while content:
            self._wait(select.POLLOUT, deadline, "exceeded reward.timeout=", self._reward.timeout)
            try:
                content = content[self._socket.send(content) :]
            except OSError:
                raise RewardProcessFailure(CRASHED) from None

    def _receive(self, reason: str, limit: float, seconds: float, *, max_bytes: int = MAX_REPLY) -> Any:
        """The content of one reply, which is a line of JSON, within some seconds; `limit` is named if it is late."""
        assert self._socket is not None
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            self._wait(select.POLLIN, deadline, reason, limit)
            try:
                received = self._socket.recv(MAX_REPLY)
            except OSError:
                received = b""
            if not received:
                raise RewardProcessFailure(CRASHED)
            line += received
            if len(line) > max_bytes:
                raise RewardProcessFailure(CORRUPTED)
        try:
            return json.loads(line)["reply"]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise RewardProcessFailure(CORRUPTED) from None

    def _wait(self, event: int, deadline: float, reason: str, seconds: float) -> None:
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, event)
        poll.register(self._lifeline.fileno(), select.POLLIN)
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if any(descriptor == self._lifeline.fileno() for descriptor, _ in ready):
            raise RunEnded
        if not ready:
            raise RewardProcessFailure(f"{reason}{seconds:g} s")


def _serve(connection: socket.socket, reward: Reward) -> None:
    """Main of the reward process, which never returns: load the terms, then reply to each call."""
    try:
        descriptor = isolate_process(connection, reward.memory_limit_gib)
        _reply_to_calls(descriptor, reward)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def isolate_process(connection: socket.socket, memory_limit_gib: float | None) -> int:
    """Prepare a forked process for user code; the descriptor of its connection to the supervisor."""
    # Even if user code blocks everything else.
    processes.die_with_parent()
    os.setsid()
    descriptor = processes.isolate_descriptors(connection.detach())
    if memory_limit_gib is not None:
        processes.limit_memory(int(memory_limit_gib * 2**30))
    return descriptor


def reply_sender(descriptor: int) -> Callable[[object], None]:
    """A function that sends a reply as a line of JSON, from this process only."""
    own_pid = os.getpid()

    def send(reply: object) -> None:
        content = json.dumps({"reply": reply}).encode() + b"\n"
        # User code may fork, and both processes return.
        if os.getpid() != own_pid:
            os._exit(0)
        while content:
            content = content[os.write(descriptor, content) :]

    return send


def call_seconds(term: Term, sizes: Sequence[int], timeout: float) -> float:
    """Time limit of a call for units of these sizes; concurrent units are started as earlier ones end."""
    at_a_time = units_at_a_time(term, max(sizes))
    return timeout if at_a_time is None else timeout * math.ceil(len(sizes) / at_a_time) + GRACE


def _is_scores(reply: object, sizes: Sequence[int]) -> bool:
    return (
        isinstance(reply, list)
        and len(reply) == len(sizes)
        and all(isinstance(scores, list) and len(scores) == size for scores, size in zip(reply, sizes, strict=True))
        and all(isinstance(score, (float, str)) for scores in reply for score in scores)
    )


def _reply_to_calls(descriptor: int, reward: Reward) -> None:
    send = reply_sender(descriptor)
    score_fns = {}
    for name, term in reward.terms.items():
        try:
            score_fns[name] = build_unit_score(term, timeout=reward.timeout)
        except Exception as error:  # an import may raise anything
            send([name, f"cannot be loaded: {describe_error(error)}"])
            return
    send(None)
    # One event loop for all calls, so that a function can keep its connections.
    with open(descriptor, "rb", closefd=False) as calls, asyncio.Runner() as runner:
        while True:
            term_name, units = pickle.load(calls)
            score = score_fns[term_name]
            at_a_time = units_at_a_time(reward.terms[term_name], max(map(len, units)))
            if at_a_time is None:
                send([_scores_of(unit, score, reward) for unit in units])
            else:
                send(runner.run(_scores_of_all(units, score, reward, at_a_time)))


def _scores_of(unit: Unit, score: UnitScore, reward: Reward) -> list[Score]:
    try:
        return _to_scores(score(unit), unit)
    except Exception as error:  # user code may raise anything; the run reports it
        return [_reason(error, reward)] * len(unit)


async def _scores_of_all(units: Sequence[Unit], score: UnitScore, reward: Reward, at_a_time: int) -> list[list[Score]]:
    """Scores of units that are awaited concurrently, each within its time limit."""
    semaphore = asyncio.Semaphore(at_a_time)

    async def scores_of(unit: Unit) -> list[Score]:
        async with semaphore:
            try:
                return _to_scores(await asyncio.wait_for(score(unit), reward.timeout), unit)
            except TimeoutError:
                return [f"exceeded reward.timeout={reward.timeout:g} s"] * len(unit)
            except Exception as error:  # user code may raise anything; the run reports it
                return [_reason(error, reward)] * len(unit)

    return await asyncio.gather(*map(scores_of, units))


def _reason(error: Exception, reward: Reward) -> str:
    if isinstance(error, MemoryError):
        return f"exceeded reward.memory_limit_gib={reward.memory_limit_gib}"
    return f"raised {describe_error(error)}"


def _to_scores(values: Any, unit: Unit) -> list[Score]:
    """One score for each sample of the unit."""
    try:
        listed = list(values)
    except TypeError:
        return [f"returned {type(values).__name__} instead of a list of numbers"] * len(unit)
    if len(listed) != len(unit):
        return [f"returned {len(listed)} numbers for {len(unit)} completions"] * len(unit)
    return [
        f"raised {describe_error(value)}" if isinstance(value, Exception) else _to_number(value) for value in listed
    ]


def _to_number(value: object) -> Score:
    """A finite number, or the reason why it is not one; NumPy scalars and booleans count as numbers."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"returned {type(value).__name__} instead of a number"
    if math.isfinite(number) and not isinstance(value, str):
        return number
    return f"returned {value!r:.200}, not a finite number"


def describe_error(error: Exception) -> str:
    """An error on one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    location = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{location}"
