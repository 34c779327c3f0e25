"""The dashboard server returns the contents of the run files, only to this machine, and nothing else of the disk."""

import http.client
import json
import socket
import struct
import subprocess
import sys
import urllib.parse

import pytest

from maxhydra.record.atomic_io import process_start
from maxhydra.runs.dashboard import machine
from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server
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


def get(server, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), content.decode()


def get_json(server, name, **parameters):
    status, _, content = get(server, f"/api/{name}?{urllib.parse.urlencode(parameters, doseq=True)}")
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
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode("latin-1"))
        assert connection.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
    assert capfd.readouterr().err == ""


def test_clients_that_hang_up_print_nothing(server, capfd):
    reset = struct.pack("ii", 1, 0)
    request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode()
    for data in (b"", b"GET / HT", request, request * 20):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
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


def test_it_is_read_only(server):
    for method in ("PUT", "DELETE"):
        assert get(server, "/api/runs", method=method)[0] == 501
    assert get(server, "/api/runs", method="POST")[0] == 403


def test_other_sites_get_nothing(server):
    status, headers, content = get(server, "/")
    assert status == 200 and headers["X-Frame-Options"] == "DENY" and "Access-Control-Allow-Origin" not in headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "connect-src 'self'" in content and "unsafe" not in content
    assert "://" not in content.replace("http-equiv", "")


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


def post(server, body, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    usual = {"Host": f"127.0.0.1:{server.server_port}", "Content-Type": "application/json"}
    connection.request("POST", "/api/profile", body=json.dumps(body), headers={**usual, **headers})
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
        for headers in ({"Origin": "https://evil.example"}, {"Content-Type": "text/plain"}, {"Host": "evil.example"}):
            assert post(server, {"run": "live"}, **headers)[0] == 403
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
