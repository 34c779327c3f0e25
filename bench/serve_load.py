"""Load test of task=serve: requests, failures, latency, time to first token, CPU time and memory. Prints JSON lines.

python bench/serve_load.py [--seconds 60] [--clients 64,256] [--tokens 16] [--random-weights | --stub-steps] [OVERRIDES]

Without overrides it serves model=tiny, trained for one step; --random-weights serves random weights of the model in the
overrides, with a made-up vocabulary of its size; --stub-steps adds programs that compute nothing, so that only the host
works. Clients run in several processes, each waiting for its response before
it sends the next request. Half of them stream; one request in twenty is aborted by the client, which does not count as
lost. A request is lost if its response is missing, truncated or not 200. The first line has the seconds from the start
of the server to "serving" and to its first response; `--clients=` measures only these.
"""

import argparse
import asyncio
import datetime
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import random_weights

CLIENTS_PER_PROCESS, MAX_PROCESSES, WARM_SECONDS = 32, 8, 4
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


class Clients:
    """Concurrent clients of one process; every figure is a list with one entry per request."""

    def __init__(self, port: int, tokens: int, until: float):
        self.port, self.tokens, self.until = port, tokens, until
        self.latencies: list[float] = []
        self.first_tokens: list[float] = []
        self.reasons: list[str] = []
        self.hung_up = 0

    async def run(self, numbers: range) -> "Clients":
        await asyncio.gather(*(self._client(number) for number in numbers))
        return self

    async def _client(self, number: int) -> None:
        link, count = None, 0
        while time.monotonic() < self.until:
            count += 1
            try:
                link = link or await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
                if (number + count) % 20 == 0:
                    await self._send(link[1], number, is_stream=True)
                    await link[0].readexactly(1)
                    self.hung_up += 1
                    link[1].close()
                    link = None
                    continue
                start = time.monotonic()
                async with asyncio.timeout(120):
                    await self._request(*link, number, is_stream=number % 2 == 0)
                self.latencies.append(time.monotonic() - start)
            except (OSError, EOFError, ValueError, AssertionError) as error:
                self.reasons.append(repr(error)[:200])
                link = None

    async def _send(self, writer: asyncio.StreamWriter, number: int, *, is_stream: bool) -> None:
        body = {"prompt": f"Client {number} asks:", "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0.8}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        data = json.dumps(body).encode()
        writer.write(HEAD.format(len(data)).encode() + data)

    async def _request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, *, is_stream: bool
    ) -> None:
        start = time.monotonic()
        await self._send(writer, number, is_stream=is_stream)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], head
        if not is_stream:
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length, head
            usage = json.loads(await reader.readexactly(int(length[1])))["usage"]
        else:
            chunks = [await _read_chunk(reader)]
            self.first_tokens.append(time.monotonic() - start)
            while chunks[-1]:
                chunks.append(await _read_chunk(reader))
            events = b"".join(chunks).decode().strip().split("\n\n")
            assert events[-1] == "data: [DONE]", events[-1]
            usage = json.loads(events[-2].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == self.tokens, usage


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n"))[:-2], 16)
    return (await reader.readexactly(size + 2))[:-2]


def run_clients(port: int, tokens: int, until: float, numbers: range) -> Clients:
    return asyncio.run(Clients(port, tokens, until).run(numbers))


def run_load(port: int, *, clients: int, tokens: int, seconds: float) -> list[Clients]:
    processes = min(MAX_PROCESSES, -(-clients // CLIENTS_PER_PROCESS))
    until = time.monotonic() + seconds
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(run_clients, port, tokens, until, range(first, clients, processes))
            for first in range(processes)
        ]
        return [part.result() for part in parts]


def memory_mib(process: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert match
    return int(match[1]) / 1024


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def all_cpu_seconds(process: int) -> list[float]:
    """CPU seconds of the engine's process, and of the HTTP processes that it has started."""
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    for thread in Path(f"/proc/{process}/task").iterdir():
        children += [int(child) for child in (thread / "children").read_text().split()]
    return [cpu_seconds(process), sum(map(cpu_seconds, set(children)))]


def metrics(port: int) -> dict[str, float]:
    command = ["curl", "-s", f"http://127.0.0.1:{port}/metrics"]
    lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.removeprefix("maxhydra_"): float(value) for name, _, value in samples}


def percentile(values: list[float], share: float) -> float | None:
    return round(sorted(values)[int(len(values) * share)], 4) if values else None


def measure(port: int, process: int, clients: int, options: argparse.Namespace) -> dict[str, object]:
    run_load(port, clients=clients, tokens=options.tokens, seconds=min(WARM_SECONDS, options.seconds))
    memory, before, cpu, start = memory_mib(process), metrics(port), all_cpu_seconds(process), time.monotonic()
    parts = run_load(port, clients=clients, tokens=options.tokens, seconds=options.seconds)
    seconds, cpu = time.monotonic() - start, [b - a for a, b in zip(cpu, all_cpu_seconds(process), strict=True)]
    after = metrics(port)
    latencies = [value for part in parts for value in part.latencies]
    first_tokens = [value for part in parts for value in part.first_tokens]
    reasons = [reason for part in parts for reason in part.reasons]
    # Requests of one duration keep the server busy until the last ones, which start just before the end.
    tokens = after["engine_tokens_written"] - before["engine_tokens_written"]
    return {
        "clients": clients,
        "seconds": round(seconds, 2),
        "requests": len(latencies) + len(reasons),
        "lost": len(reasons),
        "reasons": reasons[:3],
        "hung_up": sum(part.hung_up for part in parts),
        **{f"p{100 * share:.0f}_s": percentile(latencies, share) for share in (0.5, 0.95, 0.99)},
        **{f"first_token_p{100 * share:.0f}_s": percentile(first_tokens, share) for share in (0.5, 0.95)},
        "tokens_per_second": round(tokens / options.seconds, 1),
        "engine_cpu_us_per_token": round(1e6 * cpu[0] / max(tokens, 1), 2),
        "http_cpu_us_per_token": round(1e6 * cpu[1] / max(tokens, 1), 2),
        "programs_compiled": after["engine_programs_compiled"],
        "programs_compiled_under_load": after["engine_programs_compiled"] - before["engine_programs_compiled"],
        "memory_start_mib": round(memory, 1),
        "memory_end_mib": round(memory_mib(process), 1),
        "left_running": after["server_sequences"],
    }


def request_one(port: int) -> None:
    """One token; an error if the response is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"prompt": "First:", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    connection.close()


def describe(options: argparse.Namespace) -> dict[str, object]:
    """The model, the device, and whether the compilation cache of the overrides had files at the start."""
    values = dict(text.split("=", 1) for text in options.overrides)
    cache, gpu = values.get("hardware.compilation_cache"), ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(gpu, capture_output=True, text=True, check=False).stdout if shutil.which(gpu[0]) else ""
    return {
        "model": values.get("model", "tiny"),
        "overrides": options.overrides,
        "device": next(iter(found.splitlines()), "cpu"),
        "date": datetime.date.today().isoformat(),
        "new": options.tokens,
        **({"is_cached": Path(cache).is_dir() and any(Path(cache).iterdir())} if cache else {}),
    }


def serve_command(folder: str, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "maxhydra"]
    serve = ["task=serve", "task.port=0"]
    if options.random_weights or options.stub_steps:
        tokenizer = random_weights.write_tokenizer(folder, options.vocab_size)
        program = Path(__file__).with_name("stub_steps.py" if options.stub_steps else "random_weights.py")
        return [sys.executable, str(program), *serve, *tokenizer, *options.overrides]
    overrides = options.overrides
    if not overrides:
        train = ["run.name=run", "train.steps=1", "train.eval_batches=0", "train.sample.tokens=0"]
        quiet = subprocess.DEVNULL
        subprocess.run([*command, *train], cwd=folder, check=True, stdout=quiet, stderr=quiet)
        overrides = ["checkpoint.load_parameters=outputs/run"]
    return [*command, *serve, *overrides]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", default="64")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--stub-steps", action="store_true")
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    about = describe(options)
    with tempfile.TemporaryDirectory() as folder:
        command, start = serve_command(folder, options), time.monotonic()
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.rsplit(":", 1)[1].split("/")[0])
            serving = round(time.monotonic() - start, 1)
            request_one(port)
            started = {"start_s": serving, "first_response_s": round(time.monotonic() - start, 1)}
            compiled = {"programs_compiled": metrics(port)["engine_programs_compiled"]}
            print(json.dumps({"bench": "serve_start", **about, **started, **compiled}), flush=True)
            for clients in [int(text) for text in options.clients.split(",") if text]:
                figures = measure(port, process.pid, clients, options)
                print(json.dumps({"bench": "serve_load", **about, **figures}), flush=True)
        finally:
            process.terminate()
            code = process.wait()
    print(json.dumps({"bench": "serve_exit", "exit_code": code}))


if __name__ == "__main__":
    main()
