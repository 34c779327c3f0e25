"""The agreement of all processes on the call at which a signal ends the run."""

import threading
from collections.abc import Callable


class StopAgreement:
    """The call of `reached_stop` at which all processes end.

    As soon as a process knows of a request, it reports the number of its next call, and waits there for the decision:
    the latest of the reported calls, which no process has passed. It reports at once, because its main thread may be in
    a collective operation, which another process joins only after its own next call.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._calls, self._number = 0, 0
        self._is_reported = False
        self._stop_at: int | None = None
        self._reported: dict[int, int] = {}

    def request(self, number: int) -> bool:
        """Note a signal; False if one was noted before."""
        with self._condition:
            is_first, self._number = self._number == 0, self._number or number
            return is_first

    def report(self, send: Callable[[int], None]) -> None:
        """Report the next call, once."""
        with self._condition:
            is_reported, self._is_reported, call = self._is_reported, True, self._calls + 1
        if not is_reported:
            send(call)

    def collect(self, index: int, call: int, count: int) -> int | None:
        with self._condition:
            self._reported[index] = call
            return max(self._reported.values()) if len(self._reported) == count else None

    def decide(self, stop_at: int) -> None:
        with self._condition:
            self._stop_at = stop_at
            self._condition.notify_all()

    def reached(self, send: Callable[[int], None]) -> int | None:
        if self._number != 0:
            self.report(send)
        with self._condition:
            self._calls += 1
            if not self._is_reported:
                return None
            self._condition.wait_for(lambda: self._stop_at is not None)
            assert self._stop_at is not None
            return self._number if self._calls >= self._stop_at else None
