"""The dashboard server returns the contents of the run files, only to this machine, and nothing else of the disk."""

import hashlib
import http.client
import json
import re
import socket
import struct
import subprocess
import sys
import urllib.parse
from importlib import resources

import pytest

from maxhydra.cli.main import run as maxhydra
from maxhydra.record.atomic_io import process_start
from maxhydra.runs.access import CSRF_HEADER
from maxhydra.runs.machine import machine
from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server, read_static_files
from tests.support.run_folders import change_facts, metrics_lines, write_run

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def outputs(tmp_path):
    folder = tmp_path / "outputs"
    for number, rate in enumerate([1e-4, 1e-3, 3e-3]):
        write_run(folder / "lr" / f"{number}", rate=rate, created=f"2026-03-0{number + 1}T12:00:00Z")
    (tmp_path / "secret.txt").write_text("top secret")
    return folder


@pytest.fixture
def server(outputs, monkeypatch):
    monkeypatch.setattr("maxhydra.runs.dashboard.REFRESH_SECONDS", 0)
    server = Server(Registry(outputs), host="127.0.0.1", port=0)
    server.start()
    yield server
    server.shutdown()
    server.server_close()


def get(server, path, host=None, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=240)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), content.decode()


def get_json(server, path, /, **parameters):
    status, _, content = get(server, f"/api/{path}?{urllib.parse.urlencode(parameters, doseq=True)}")
    assert status == 200, content
    return json.loads(content)


def test_only_changes_are_sent_again(server, outputs):
    first = get_json(server, "runs", since="")
    assert first["whole"] and [run["path"] for run in first["runs"]] == ["lr/2", "lr/1", "lr/0"]
    assert first["runs"][1]["steps"] == 40 and first["runs"][1]["metrics"]["eval/loss"] == pytest.approx(2.625)
    again = get_json(server, "runs", since=first["token"])
    assert not again["whole"] and again["runs"] == [] and again["count"] == 3
    with (outputs / "lr" / "0" / "metrics.jsonl").open("a") as file:
        file.write(metrics_lines(41, 0.0))
    later = get_json(server, "runs", since=first["token"])
    assert [(run["path"], run["step"]) for run in later["runs"]] == [("lr/0", 41)]
    (outputs / ".runs.sqlite").unlink()
    assert get_json(server, "runs", since="another-7")["whole"]


def test_curves_match_the_files(server, outputs):
    charts = {chart["metric"]: chart for chart in get_json(server, "curves", run=["lr/1", "lr/2"])["charts"]}
    assert list(charts)[:2] == ["eval/loss", "loss"] and charts["tokens_per_second"]["system"]
    train = charts["loss"]["lines"][1]
    rows = [json.loads(text) for text in (outputs / "lr" / "2" / "metrics.jsonl").read_text().splitlines()]
    assert train["run"] == "lr/2" and train["look"] == "1"
    assert train["values"] == [pytest.approx(row["loss"], rel=1e-4) for row in rows if "loss" in row]


def test_queries(server):
    assert get_json(server, "select", condition=["eval/loss<2.7"])["paths"] == ["lr/1"]
    assert "did you mean 'optimizer.kind'?" in get_json(server, "select", condition=["optimizer.knd=x"])["problem"]
    comparison = get_json(server, "compare", run=["lr/0", "lr/1"])
    assert comparison["config"] == [{"name": "optimizer.learning_rate", "values": [0.0001, 0.001]}]
    assert get_json(server, "values", key="optimizer.learning_rate")["values"]["lr/2"] == 0.003
    assert "eval/loss" in get_json(server, "keys")["metrics"]
    assert get_json(server, "log", run="lr/1")["text"].endswith("end of 1\n")


def test_local_machine(tmp_path, monkeypatch):
    state = machine(tmp_path)
    assert state["load"] >= 0 and 0 < state["memory"][0] < state["memory"][1] and state["gpus"] == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 75, 1024, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine(tmp_path)["gpus"] == [{"name": "NVIDIA H200", "busy": 0.75, "memory": [2**30, 143771 * 2**20]}]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "", "127.0.0.1:1"])
def test_other_host_names_are_rejected(server, host):
    status, _, content = get(server, "/api/runs", host=host or " ")
    assert status == 403 and "lr/" not in content
    assert get(server, "/", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("target", ["http://[::1", "//[", "/api/runs?" + "a=1&" * 2000, "\x00", "/api/log?run=%00"])
def test_malformed_targets_get_an_error_and_print_nothing(server, target, capfd):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=240) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode("latin-1"))
        assert connection.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
    assert capfd.readouterr().err == ""


def test_clients_that_hang_up_print_nothing(server, capfd):
    reset = struct.pack("ii", 1, 0)
    request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode()
    for data in (b"", b"GET / HT", request, request * 20):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=240) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.sendall(data)
    assert get(server, "/")[0] == 200
    server.shutdown()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/secret.txt",
        "/api/log?run=../secret.txt",
        "/api/log?run=lr/0/../../../secret.txt",
        "/api/log?run=%2e%2e/secret.txt",
        "/api/log?run=/etc/passwd",
        "/api/log",
        "/api/values",
        "/api/nothing",
        "//evil.example/",
    ],
)
def test_no_other_file_is_served(server, path):
    status, _, content = get(server, path)
    assert status in (400, 404) and "top secret" not in content and "root:" not in content


def test_other_methods_and_posts_without_a_token_are_rejected(server):
    for method in ("PUT", "DELETE"):
        assert get(server, "/api/runs", method=method)[0] == 501
    assert get(server, "/api/runs", method="POST")[0] == 403


def test_other_sites_get_nothing(server):
    status, headers, content = get(server, "/")
    assert status == 200 and headers["X-Frame-Options"] == "DENY" and "Access-Control-Allow-Origin" not in headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    rules = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == "'none'" and set(rules.values()) == {"'self'"}
    assert "://" not in content and "style=" not in content and "<script>" not in content


def test_vendored_files_are_those_of_the_table(server):
    folder = resources.files("maxhydra.runs").joinpath("web", "vendor")
    table = dict(re.findall(r"^\| `(.+?)` .* \| `([0-9a-f]{64})` \|$", folder.joinpath("README.md").read_text(), re.M))
    assert len(table) == 3
    assert {name: hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() for name in table} == table
    assert get(server, "/static/vendor/uPlot.iife.min.js")[1]["Content-Type"].startswith("text/javascript")
    assert "vendor/README.md" not in read_static_files()


def test_only_this_machine_is_served(server):
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", server.server_port), 2):
        pass


def test_texts_are_sent_as_data(server, outputs):
    change_facts(outputs / "lr" / "0", notes=EVIL, tags=[EVIL], reason=EVIL)
    _, headers, content = get(server, "/api/runs")
    assert headers["Content-Type"].startswith("application/json") and json.loads(content)["runs"][-1]["notes"] == EVIL


HANDLER = """
import signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: print("profile", flush=True))
print("ready", flush=True)
time.sleep(60)
"""


def post(server, body, action="profile", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=240)
    usual = {"Host": f"127.0.0.1:{server.server_port}", "Content-Type": "application/json"}
    usual[CSRF_HEADER] = server.access.csrf_token
    connection.request("POST", f"/api/{action}", body=json.dumps(body), headers={**usual, **headers})
    response = connection.getresponse()
    return response.status, response.read().decode()


def live_run(folder, code):
    """A run whose process is this Python code, and the process."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    write_run(folder)
    session = {"host": socket.gethostname(), "pid": process.pid, "pid_started": process_start(process.pid)}
    facts = json.loads((folder / "run.json").read_text())
    sessions = [{**facts["sessions"][-1], **session, "status": "running", "ended": None}]
    change_facts(folder, status="running", sessions=sessions)
    return process


def test_a_button_asks_a_live_run_for_a_profile(server, outputs):
    process = live_run(outputs / "live", HANDLER)
    ignorant = live_run(outputs / "old", "import time; print('ready', flush=True); time.sleep(60)")
    try:
        get_json(server, "runs", since="")
        forged = {
            "Origin": "https://evil.example",
            "Content-Type": "text/plain",
            "Host": "evil.example",
            CSRF_HEADER: "x",
        }
        for name, value in forged.items():
            assert post(server, {"run": "live"}, **{name: value})[0] == 403
        assert post(server, {"run": "live"}, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200
        assert process.stdout.readline() == "profile\n"
        # A process that does not handle the signal would be ended by it.
        status, content = post(server, {"run": "old"})
        assert status == 400 and "kill -USR2" in content and ignorant.poll() is None
        assert post(server, {"run": "lr/0"})[0] == 400
        assert post(server, {"run": "../secret"})[0] == post(server, ["run"])[0] == post(server, {})[0] == 404
        assert get_json(server, "profiles", run="lr/0") == {"profiles": []}
    finally:
        for child in (process, ignorant):
            child.kill()
            child.wait()


def test_tags_and_notes(server, outputs):
    assert post(server, {"run": "lr/0", "add": ["keep", "paper"]}, "tag")[0] == 200
    assert post(server, {"run": "lr/0", "remove": ["keep"]}, "tag")[0] == 200
    assert post(server, {"run": "lr/0", "text": "line 1\nline 2"}, "note")[0] == 200
    (run,) = [run for run in get_json(server, "runs", since="")["runs"] if run["path"] == "lr/0"]
    assert run["tags"] == ["paper"] and run["notes"] == "line 1\nline 2"
    status, content = post(server, {"run": "lr/0", "add": ["a,b"]}, "tag")
    assert status == 400 and "contains a comma" in json.loads(content)["problem"]
    assert post(server, {"run": "lr/0", "text": "\x1b[31m"}, "note")[0] == 400
    assert post(server, {"run": "../secret", "text": "x"}, "note")[0] == 404
    assert post(server, {"run": "lr/0"}, "delete")[0] == 404


STOPPED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
print("ready", flush=True)
time.sleep(60)
"""


def test_stop_asks_a_live_run_to_save(server, outputs, capsys):
    children = {name: live_run(outputs / name, STOPPED) for name in ("first", "second")}
    try:
        get_json(server, "runs", since="")
        assert "saves a checkpoint" in post(server, {"run": "first"}, "stop")[1]
        assert children["first"].stdout.readline() == "saved\n"
        assert maxhydra(["runs", "stop", "second", "-o", str(outputs)]) == 0
        assert children["second"].stdout.readline() == "saved\n"
        assert "saves a checkpoint" in capsys.readouterr().out
        status, content = post(server, {"run": "lr/0"}, "stop")
        assert status == 400 and "is not running: finished" in content
    finally:
        for child in children.values():
            child.kill()
            child.wait()


@pytest.mark.slow
def test_resume_starts_the_run_or_says_why_it_did_not(server, outputs, monkeypatch):
    """The command of this run has a key that does not exist, so the process ends with a message."""
    monkeypatch.setattr("maxhydra.runs.actions.START_SECONDS", 60)
    change_facts(outputs / "lr" / "0", overrides=["optimizer.learning_rat=1"])
    status, content = post(server, {"run": "lr/0"}, "resume")
    assert status == 400 and "did not resume: exit code 2" in content
    facts = json.loads((outputs / "lr" / "1" / "run.json").read_text())
    (outputs / "lr" / "1" / "run.json").write_text(json.dumps({**facts, "folder": "/nowhere"}))
    status, content = post(server, {"run": "lr/1"}, "resume")
    assert status == 400 and "no longer exists" in content


@pytest.mark.slow
def test_cancel_is_that_of_the_sweep_command(server, outputs):
    status, content = post(server, {"sweep": "lr"}, "cancel")
    assert status == 400 and "is not a sweep" in content
    assert post(server, {"sweep": ".."}, "cancel")[0] == 404


def test_other_addresses_need_the_access_token(outputs):
    server = Server(Registry(outputs), host="0.0.0.0", port=0)
    server.start()
    try:
        token = server.access.token
        assert server.url.endswith(f"/?token={token}")
        assert get(server, "/")[0] == get(server, "/api/runs")[0] == get(server, "/static/page.js")[0] == 401
        assert (
            get(server, "/?token=wrong")[0]
            == get(server, "/api/runs", Cookie=f"maxhydra_{server.server_port}=x")[0]
            == 401
        )
        status, headers, _ = get(server, f"/?token={token}", host="machine.example:1")
        cookie, _, rules = headers["Set-Cookie"].partition(";")
        assert status == 303 and headers["Location"] == "/" and "HttpOnly" in rules and "SameSite=Strict" in rules
        assert get(server, "/api/runs", Cookie=cookie)[0] == 200
        assert get(server, "/api/runs", Authorization=f"Bearer {token}")[0] == 200
        note = {"run": "lr/0", "text": "x"}
        assert post(server, note, "note")[0] == 403 and post(server, note, "note", Cookie=cookie)[0] == 200
    finally:
        server.shutdown()
        server.server_close()


def test_loopback_may_need_a_token_too(outputs):
    server = Server(Registry(outputs), host="127.0.0.1", port=0, needs_token=True)
    server.start()
    assert get(server, "/api/runs")[0] == 401
    server.shutdown()
    server.server_close()


def test_reports_are_isolated_from_the_page(server):
    for query in ("run=lr/1", "sweep=lr"):
        status, headers, content = get(server, f"/report?{query}")
        assert status == 200 and content.startswith("<!doctype html>")
        assert headers["Content-Security-Policy"] == "sandbox allow-scripts allow-downloads"
    assert get(server, "/report?run=../secret.txt")[0] == get(server, "/report?sweep=nothing")[0] == 404


def test_other_axes_are_sums_over_the_steps(server, outputs):
    rows = [{"step": step, "loss": 1.0, "step_time": 0.5, "tokens_per_second": 100.0} for step in (2, 4, 10)]
    rows = [{**row, "tflops_per_device": 3.0} for row in rows]
    (outputs / "lr" / "0" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    change_facts(outputs / "lr" / "0", devices="4 x NVIDIA H200")
    get_json(server, "runs", since="")
    axes = get_json(server, "curves", run="lr/0")["axes"]["lr/0"]
    assert axes["steps"] == [0, 2, 4, 10] and axes["seconds"] == [0, 1, 2, 5]
    assert axes["tokens"] == [0, 100, 200, 500] and axes["flops"] == [0, 12e12, 24e12, 60e12]


def test_sweep(server, outputs):
    sweep = get_json(server, "sweep", name="lr")
    assert sweep["metric"] == "eval/loss" and sweep["varied"] == ["optimizer.learning_rate"]
    assert [line["path"] for line in sweep["lines"]] == ["lr/1", "lr/2", "lr/0"]
    assert [trial["path"] for trial in sweep["trials"]] == ["lr/0", "lr/1", "lr/2"] and not sweep["is_live"]
    assert get_json(server, "sweep", name="lr", largest="1")["lines"][0]["path"] == "lr/0"
    plan = {"objectives": ["eval/loss"], "settings": {"directions": ["maximize"]}}
    (outputs / "lr" / "sweep.json").write_text(json.dumps(plan))
    assert get_json(server, "sweep", name="lr")["largest"]


def test_the_direction_of_a_grid_follows_from_its_metric(server, outputs):
    """A plan without objectives is that of a grid; larger throughput is better."""
    (outputs / "lr" / "sweep.json").write_text(json.dumps({"objectives": [], "settings": {"directions": []}}))
    assert not get_json(server, "sweep", name="lr")["largest"]
    assert get_json(server, "sweep", name="lr", metric="tokens_per_second")["largest"]
    assert not get_json(server, "sweep", name="lr", metric="tokens_per_second", largest="0")["largest"]


def test_evaluations(server, outputs):
    folder = outputs / "lr" / "0"
    rows = [{"step": step, "eval/cloze/acc": step / 100, "eval/cloze/acc_stderr": 0.01} for step in range(10, 260, 10)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "eval.json").write_text(json.dumps({"250": {"needle": {"metrics": {}, "grid": [[128, 0.5, 1.0]]}}}))
    change_facts(folder, sample="Once upon a time")
    get_json(server, "runs", since="")
    ((run,),) = get_json(server, "evaluations", run="lr/0").values()
    assert run["steps"][-1] == 250 and len(run["steps"]) <= 12 and run["metrics"]["eval/cloze/acc"][-1] == 2.5
    assert (
        run["grids"] == [{"title": "needle, 250", "cells": [[128, 0.5, 1.0]]}] and run["sample"] == "Once upon a time"
    )


def test_log_search(server, outputs):
    lines = [f"line {number} {'ERROR' if number % 1000 == 0 else 'fine'}\n" for number in range(1, 5001)]
    (outputs / "lr" / "0" / "log.txt").write_text("".join(lines))
    found = get_json(server, "log", run="lr/0", text="error")
    assert found["count"] == 5 and found["text"].splitlines()[0] == "  1000  line 1000 ERROR"
