"""Alerts about a run: a command or a webhook is called when something happens to it.

A thread delivers them, so that neither a slow receiver nor a failing one affects the run. Only process 0 sends. Events
that can repeat are limited to one per `min_seconds`; at the end of the run, delivery may take `timeout` seconds.
"""

import contextlib
import json
import logging
import math
import os
import queue
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from maxhydra.config.schema.health import END_EVENTS, Alerts
from maxhydra.record.redact import redact_text

log = logging.getLogger("maxhydra")
RETRIES = 3
FIRST_RETRY_SECONDS = 1.0
# Losses that are known before one can be a spike.
ENOUGH = 10

_active: "_Sender | None" = None


@contextlib.contextmanager
def attached(settings: Alerts, facts: Mapping[str, Any], *, is_main: bool) -> Iterator[None]:
    """Send alerts of the run inside; `facts` (name, path, task) are part of each."""
    global _active
    if not is_main or (settings.command is None and settings.webhook is None):
        yield
        return
    _active = _Sender(settings, facts)
    try:
        yield
    finally:
        _active.close()
        _active = None


def send(event: str, message: str, *, step: int | None = None) -> None:
    """Send an alert, if the run has any for this event; returns at once."""
    if _active is not None:
        _active.send(event, message, step=step)


def flush() -> None:
    """Wait for pending alerts, for at most alerts.timeout: before the process ends without unwinding."""
    if _active is not None:
        _active.close()


def observe(step: int, values: Mapping[str, float]) -> None:
    """Send alerts about the metrics of a logged step: one that is not finite, or a spike of the loss."""
    if _active is not None:
        _active.observe(step, values)


def spike_threshold(losses: list[float], factor: float) -> float:
    """median + factor * MAD, the median absolute deviation, which a few outliers do not change."""
    middle = statistics.median(losses)
    return middle + factor * statistics.median(abs(loss - middle) for loss in losses)


class _Sender:
    """Queues alerts, and delivers them in a thread."""

    def __init__(self, settings: Alerts, facts: Mapping[str, Any]):
        self._settings = settings
        self._facts = {"host": socket.gethostname(), **facts}
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._sent: dict[str, float] = {}
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver_all, name="alerts", daemon=True)
        self._thread.start()

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        loss, norm = values["loss"], values["grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.send("nan", f"loss {loss:g}, gradient norm {norm:g}", step=step)
            return
        if len(self._losses) >= min(ENOUGH, self._settings.spike_window):
            threshold = spike_threshold(list(self._losses), self._settings.spike_factor)
            if loss > threshold:
                self.send("spike", f"loss {loss:g} is above {threshold:g}", step=step)
        self._losses.append(loss)

    def send(self, event: str, message: str, *, step: int | None) -> None:
        if event not in self._settings.events:
            return
        now = time.monotonic()
        is_limited = event not in END_EVENTS and now - self._sent.get(event, -math.inf) < self._settings.min_seconds
        if is_limited:
            return
        self._sent[event] = now
        message = redact_text(message)
        where = "" if step is None else f" at step {step}"
        text = f"{self._facts.get('run', 'run')}: {event}{where}: {message}"
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._queue.put({"event": event, "text": text, "message": message, "step": step, "time": moment, **self._facts})

    def close(self) -> None:
        """Deliver pending alerts, within the timeout."""
        self._queue.put(None)
        self._thread.join(self._settings.timeout)
        if self._thread.is_alive():
            log.warning("alerts: some were not delivered within %g s", self._settings.timeout)

    def _deliver_all(self) -> None:
        while (alert := self._queue.get()) is not None:
            for deliver in (self._run_command, self._post):
                try:
                    deliver(alert)
                except Exception as error:
                    log.warning("alerts: %s was not delivered: %s", alert["event"], redact_text(str(error)))

    def _run_command(self, alert: Mapping[str, Any]) -> None:
        """Run the command with the alert as JSON on stdin; one that takes too long is killed with its children."""
        if self._settings.command is None:
            return
        variables = {f"MAXHYDRA_ALERT_{name.upper()}": str(alert[name]) for name in ("event", "text", "run", "path")}
        process = subprocess.Popen(
            self._settings.command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(json.dumps(alert).encode(), timeout=self._settings.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError(f"alerts.command took more than {self._settings.timeout:g} s") from None
        if process.returncode:
            detail = errors.decode(errors="replace").strip()[-200:]
            raise OSError(f"alerts.command exited with {process.returncode} {detail}".rstrip())

    def _post(self, alert: Mapping[str, Any]) -> None:
        """Post the alert as JSON, again after an error of the network or the server. Errors name only the host."""
        if self._settings.webhook is None:
            return
        request = urllib.request.Request(
            self._settings.webhook,
            data=json.dumps(alert).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "maxhydra"},
        )
        host = urllib.parse.urlsplit(self._settings.webhook).hostname
        for attempt in range(RETRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._settings.timeout):
                    return
            except urllib.error.HTTPError as error:
                reason, is_final = f"status {error.code}", error.code < 500 and error.code not in (408, 429)
            except OSError as error:
                reason, is_final = type(error).__name__, False
            if is_final or attempt == RETRIES:
                raise OSError(f"{host}: {reason}")
            time.sleep(FIRST_RETRY_SECONDS * 2**attempt)
