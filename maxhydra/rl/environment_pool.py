"""The run's side of environments: calls to the processes of episodes, and checks of their replies."""

import contextlib
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.reward import Environment as Config
from maxhydra.config.schema.reward import EnvironmentKind
from maxhydra.rl.environment_process import CRASHES, END, INVALID, RESET, STEP, Failure, supervise
from maxhydra.rl.environments import Message
from maxhydra.rl.reward_process import LoadFailure, SupervisorLink

log = logging.getLogger("maxhydra")


class EnvironmentPool:
    """Environments in separate processes. The constructor starts them; ConfigError if one cannot be loaded.

    A call returns a Future, so that many environments step at the same time; its result is a checked reply or a
    Failure.
    """

    def __init__(self, config: Config, *, is_active: bool = True):
        """`is_active`: False in processes of a run that make no calls."""
        self._config = config
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Any]] = {}
        self._reasons: Counter[str] = Counter()
        self._is_closed = False
        self._link = self._start() if is_active else None

    def reset(self, slot: int, record: Mapping[str, Any]) -> "Future[Any]":
        """Start an episode in a slot, in place of the one before; {"messages": [...], "tools": [...] or None}."""
        return self._call(slot, RESET, dict(record))

    def step(self, slot: int, message: Message) -> "Future[Any]":
        """The reply to the model's turn: {"messages": [...], "reward": number, "done": bool}, maybe with "scores"."""
        return self._call(slot, STEP, dict(message))

    def end(self, slot: int) -> None:
        """End the episode of a slot."""
        # A supervisor that has ended has killed its processes.
        with self._lock, contextlib.suppress(OSError):
            assert self._link is not None
            self._link.pipe.send((slot, END, None))

    def close(self) -> None:
        """Kill the processes, and everything that they have started."""
        self._is_closed = True
        if self._link is not None:
            self._link.stop()

    def report(self, failure: Failure) -> None:
        """Log each distinct reason once."""
        self._reasons[failure.reason] += 1
        if self._reasons[failure.reason] == 1:
            log.warning("the environment %s; its episode is excluded from the loss", failure.reason)

    def _start(self) -> SupervisorLink:
        link = SupervisorLink(supervise, self._config)
        try:
            reply = link.pipe.recv()
        except (EOFError, OSError):
            link.stop()
            raise RuntimeError("the supervisor of environments ended while it started; see stderr") from None
        if isinstance(reply, LoadFailure):
            link.stop()
            field = reply.term if getattr(self._config, reply.term, None) else "kind"
            hint = "check that its folder is on PYTHONPATH" if field != "kind" else _installation(self._config.kind)
            value = getattr(self._config, field) if field != "kind" else self._config.kind.value
            raise ConfigError(Problem(f"environment.{field}", reply.reason, value=value, hint=hint))
        threading.Thread(target=self._receive, args=(link,), name="environments", daemon=True).start()
        return link

    def _call(self, slot: int, name: str, argument: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            self._futures[slot] = future
            assert self._link is not None
            try:
                self._link.pipe.send((slot, name, argument))
            except OSError:
                self._restart()
                self._futures.pop(slot, None)
                future.set_result(Failure(CRASHES, "crashed the supervisor of environments"))
        return future

    def _restart(self) -> None:
        """Replace a supervisor that user code has killed."""
        if not self._is_closed and self._link is not None:
            self._link.stop()
            self._link = self._start()

    def _receive(self, link: SupervisorLink) -> None:
        """Complete the futures of replies, in a thread, until the supervisor ends."""
        try:
            while True:
                slot, reply = link.pipe.recv()
                with self._lock:
                    future = self._futures.pop(slot, None)
                if future is not None:
                    future.set_result(reply if isinstance(reply, Failure) else check_reply(reply))
        except (EOFError, OSError):
            with self._lock:
                pending, self._futures = self._futures, {}
        for future in pending.values():
            future.set_result(Failure(CRASHES, "crashed the supervisor of environments"))


def _installation(kind: EnvironmentKind) -> str:
    """What to do about an environment that cannot be loaded."""
    has_own_extra = kind in (EnvironmentKind.openenv, EnvironmentKind.verifiers)
    command = f"pip install 'maxhydra[{kind.value if has_own_extra else 'rl'}]'"
    is_own = kind is EnvironmentKind.verifiers
    return f"{command}, and check that environment.function is on PYTHONPATH" if is_own else command


def check_reply(reply: Any) -> Any:
    """The reply, or the Failure of one that is not what `reset` and `step` return."""
    if not isinstance(reply, dict) or not isinstance(reply.get("messages"), list):
        return Failure(INVALID, "returned messages that are not a list")
    if "reward" in reply and not math.isfinite(reply["reward"]):
        return Failure(INVALID, f"returned the reward {reply['reward']}, not a finite number")
    if not all(map(math.isfinite, reply.get("scores", {}).values())):
        return Failure(INVALID, f"returned the scores {reply['scores']}, not finite numbers")
    if not reply["messages"] and not reply.get("done"):
        return Failure(INVALID, "returned no messages, although the episode continues")
    # Only a prompt may contain turns of the assistant.
    roles = ("system", "user", "tool") if "reward" in reply else ("system", "user", "tool", "assistant")
    for message in reply["messages"]:
        is_message = isinstance(message, dict) and message.get("role") in roles
        if not is_message or not isinstance(message.get("content"), str):
            accepted = f"role: {', '.join(roles)}; content: text"
            return Failure(INVALID, f"returned the message {message!r:.200}; accepted: {accepted}")
    return reply
