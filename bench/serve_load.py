"""Load test of task=serve: requests, failures, latency and the server's memory. Prints one JSON line.

python bench/serve_load.py [--seconds 60] [--clients 64] [--tokens 16] [OVERRIDES ...]

Without overrides it serves model=tiny, trained for one step. Half of the clients stream; one request in twenty is
aborted by the client, which does not count as lost. A request is lost if its response is missing, truncated or not 200.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# New batch shapes compile new programs, which stay in memory: it levels off once the common ones are compiled.
WARM_SECONDS, WARM_ROUNDS, LEVEL_MIB = 10, 9, 1.0


class Load:
    """Request counters, shared by all client threads."""

    def __init__(self, port: int, tokens: int, until: float):
        self.port, self.tokens, self.until = port, tokens, until
        self.latencies: list[float] = []
        self.hung_up = self.lost = 0
        self.reasons: list[str] = []
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        count = 0
        while time.monotonic() < self.until:
            count += 1
            start = time.monotonic()
            try:
                if (number + count) % 20 == 0:
                    self._hang_up(number)
                    continue
                self._request(link, number, is_stream=number % 2 == 0)
            except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
                with self._lock:
                    self.lost += 1
                    self.reasons.append(repr(error)[:200])
                link.close()
                continue
            with self._lock:
                self.latencies.append(time.monotonic() - start)

    def _request(self, link: http.client.HTTPConnection, number: int, *, is_stream: bool) -> None:
        link.request("POST", "/v1/completions", self._body(number, is_stream=is_stream), self._headers)
        response = link.getresponse()
        data = response.read()
        assert response.status == 200, (response.status, data[:200])
        if is_stream:
            events = data.decode().strip().split("\n\n")
            assert events[-1] == "data: [DONE]", events[-1]
            usage = json.loads(events[-2].removeprefix("data: "))["usage"]
        else:
            usage = json.loads(data)["usage"]
        assert usage["completion_tokens"] == self.tokens, usage

    def _hang_up(self, number: int) -> None:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        link.request("POST", "/v1/completions", self._body(number, is_stream=True), self._headers)
        link.getresponse().read(1)
        link.close()
        with self._lock:
            self.hung_up += 1

    _headers = {"Content-Type": "application/json"}  # noqa: RUF012

    def _body(self, number: int, *, is_stream: bool) -> str:
        body = {"prompt": f"Client {number} asks:", "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0.8}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        return json.dumps(body)


def memory_mib(process: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert match
    return int(match[1]) / 1024


def metrics(port: int) -> dict[str, float]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", "/metrics")
    lines = link.getresponse().read().decode().splitlines()
    return {line.split()[0].removeprefix("maxhydra_"): float(line.split()[1]) for line in lines}


def run_load(port: int, *, clients: int, tokens: int, seconds: float) -> Load:
    load = Load(port, tokens, time.monotonic() + seconds)
    threads = [threading.Thread(target=load.client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return load


def warm_up(port: int, process: int, options: argparse.Namespace) -> float:
    """Run load until three rounds in a row have not increased the server's memory; returns it."""
    levels = [memory_mib(process)]
    for _ in range(WARM_ROUNDS):
        run_load(port, clients=options.clients, tokens=options.tokens, seconds=WARM_SECONDS)
        levels.append(memory_mib(process))
        if len(levels) > 3 and levels[-1] - levels[-3] < LEVEL_MIB:
            break
    return levels[-1]


def measure(process: subprocess.Popen[str], options: argparse.Namespace) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(line.rsplit(":", 1)[1].split("/")[0])
    before = warm_up(port, process.pid, options)
    tokens_before = metrics(port)["engine_tokens_written"]
    load = run_load(port, clients=options.clients, tokens=options.tokens, seconds=options.seconds)
    time.sleep(1)
    after = metrics(port)
    latencies = sorted(load.latencies)
    return {
        "clients": options.clients,
        "seconds": options.seconds,
        "requests": len(latencies) + load.lost,
        "lost": load.lost,
        "reasons": load.reasons[:3],
        "hung_up": load.hung_up,
        "p50_s": round(latencies[len(latencies) // 2], 3),
        "p95_s": round(latencies[len(latencies) * 95 // 100], 3),
        "tokens_per_second": round((after["engine_tokens_written"] - tokens_before) / options.seconds, 1),
        "memory_start_mib": round(before, 1),
        "memory_end_mib": round(memory_mib(process.pid), 1),
        "left_running": after["server_sequences"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "maxhydra"]
        overrides = options.overrides
        if not overrides:
            train = ["run.name=run", "train.steps=1", "train.eval_batches=0", "train.sample.tokens=0"]
            quiet = subprocess.DEVNULL
            subprocess.run([*command, *train], cwd=folder, check=True, stdout=quiet, stderr=quiet)
            overrides = ["checkpoint.load_parameters=outputs/run"]
        serve = [*command, "task=serve", "task.port=0", *overrides]
        process = subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            figures = measure(process, options)
        finally:
            process.terminate()
            code = process.wait()
    print(json.dumps({"bench": "serve_load", **figures, "exit_code": code}))


if __name__ == "__main__":
    main()
