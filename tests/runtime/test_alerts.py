"""Alerts: to a server on loopback, to commands, at a limited rate, and never at the expense of the run."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config.schema.health import Alerts
from maxhydra.record.redact import redact_argv, redact_config
from maxhydra.runtime import alerts
from tests.support.polling import wait_for
from tests.support.processes import is_alive

FACTS = {"run": "it", "path": "/outputs/it", "task": "pretrain"}
METRICS = {"loss": 2.0, "grad_norm": 1.0}


class Receiver(ThreadingHTTPServer):
    """Stores the alerts that it receives; responds with the statuses of `answers` first, then with 200."""

    daemon_threads = True

    def __init__(self, *answers: int, delay: float = 0.0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[dict[str, Any]] = []
        self.answers, self.delay = list(answers), delay
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/T000/SECRETPATH"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay)
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status == 200:
            self.server.received.append(content)
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def short_retries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(alerts, "FIRST_RETRY_SECONDS", 0.01)
    yield
    assert alerts._active is None


def test_events_reach_a_webhook_at_a_limited_rate() -> None:
    receiver = Receiver()
    with alerts.attached(Alerts(webhook=receiver.url, min_seconds=100), FACTS, is_main=True):
        for step in range(1, 30):
            alerts.observe(step, {**METRICS, "loss": 2.0 + 0.01 * (step % 5)})
        alerts.observe(30, {**METRICS, "loss": 2.5})
        alerts.observe(31, {**METRICS, "loss": 2.6})
        alerts.observe(32, {**METRICS, "grad_norm": float("nan")})
        alerts.send("stall", "step 33 has not completed", step=33)
        alerts.send("finished", "all steps done")
        alerts.send("failed", "token=hf_abcdefghijklmnopqrstuvwx")
    assert [alert["event"] for alert in receiver.received] == ["spike", "nan", "stall", "finished", "failed"]
    spike, nan, *_, failed = receiver.received
    assert {name: spike[name] for name in FACTS} == FACTS and spike["step"] == 30
    assert spike["text"].startswith("it: spike at step 30: loss 2.5 is above 2.1")
    assert "gradient norm nan" in nan["message"] and "hf_" not in failed["text"]


def test_the_threshold_of_a_spike() -> None:
    losses = [*np.random.default_rng(0).normal(3, 0.1, 99), 50.0]
    middle = np.median(losses)
    expected = middle + 7 * np.median(np.abs(losses - middle))
    assert alerts.spike_threshold(losses, 7) == pytest.approx(expected)


def test_only_chosen_events_of_process_0_are_sent() -> None:
    receiver = Receiver()
    with alerts.attached(Alerts(webhook=receiver.url, events=["failed"]), FACTS, is_main=True):
        alerts.send("finished", "done")
    with alerts.attached(Alerts(webhook=receiver.url), FACTS, is_main=False):
        alerts.send("failed", "")
    with alerts.attached(Alerts(), FACTS, is_main=True):
        alerts.send("failed", "")
    alerts.send("failed", "outside of a run")
    assert receiver.received == []


@pytest.mark.parametrize(("answers", "delivered"), [([503, 429], 1), ([404], 0), ([500] * 4, 0)])
def test_errors_of_the_server_are_retried(answers: list[int], delivered: int, caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver(*answers)
    with caplog.at_level(logging.WARNING), alerts.attached(Alerts(webhook=receiver.url), FACTS, is_main=True):
        alerts.send("finished", "done")
    assert len(receiver.received) == delivered
    assert ("status" in caplog.text) == (not delivered) and "SECRETPATH" not in caplog.text


def test_a_receiver_that_hangs_or_is_gone_does_not_delay_the_run(caplog: pytest.LogCaptureFixture) -> None:
    receiver, start = Receiver(delay=600.0), time.monotonic()
    with alerts.attached(Alerts(webhook=receiver.url, timeout=0.2), FACTS, is_main=True):
        for step in range(1000):
            alerts.send("finished", str(step))
    # Waiting for each would take 200 s.
    assert time.monotonic() - start < 100 and "not delivered" in caplog.text
    with alerts.attached(Alerts(webhook="http://127.0.0.1:9/x"), FACTS, is_main=True):
        alerts.send("finished", "")
    assert "127.0.0.1: " in caplog.text


def test_a_command_gets_the_alert_and_is_killed_after_the_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = f'cat > {tmp_path}/alert.json; echo "$MAXHYDRA_ALERT_EVENT $MAXHYDRA_ALERT_TEXT" > {tmp_path}/text'
    with alerts.attached(Alerts(command=command), FACTS, is_main=True):
        alerts.send("preempted", "SIGTERM; rm -rf $HOME `id`", step=7)
    assert json.loads((tmp_path / "alert.json").read_text())["step"] == 7
    assert (tmp_path / "text").read_text() == "preempted it: preempted at step 7: SIGTERM; rm -rf $HOME `id`\n"
    slow = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with alerts.attached(Alerts(command=slow, timeout=2.0), FACTS, is_main=True):
        alerts.send("finished", "")
        wait_for(lambda: "took more than 2 s" in caplog.text)
    with alerts.attached(Alerts(command="echo broken >&2; exit 3"), FACTS, is_main=True):
        alerts.send("finished", "")
    assert "exited with 3 broken" in caplog.text
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_the_url_is_a_secret() -> None:
    url = "https://hooks.example.com/services/T000/SECRETPATH"
    assert redact_argv([f"alerts.webhook={url}"]) == ["alerts.webhook=***"]
    assert redact_config({"alerts": {"webhook": url, "timeout": 1.0}})["alerts"] == {"webhook": "***", "timeout": 1.0}


def test_unknown_events_and_addresses_are_rejected() -> None:
    problems = [str(problem) for problem in Alerts(events=["nann"], webhook="ftp://x").check()]
    assert "did you mean 'nan'" in problems[0] and "https://" in problems[1] and "ftp" not in problems[1]
