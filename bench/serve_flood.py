"""Latency of small requests while clients flood task=serve with large ones. Prints one JSON line per kind of body.

python bench/serve_flood.py [--seconds 10] [--flooders 4] [--realtime] [--tree CHECKOUT] [KIND ...]

A probe posts small requests one after the other. Flooders, each a process of niceness 19, post bodies of about 3.9 MB
without pause. The kind `none` is the idle server. --tree serves another checkout of this repository, for comparison.
--realtime (as root) schedules the threads of the server and the probe before all other processes of the machine, and
the flooders and child processes of the server, with niceness -10, next: on a busy machine, the latencies then still
show only what the server waits for.
"""

import argparse
import collections
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# With --realtime.
FLOOD_NICENESS = -10
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL = json.dumps({"prompt": "one", "max_tokens": 2, "temperature": 0}).encode()


def make_body(kind: str) -> tuple[str, bytes]:
    """Path and body of a large request."""
    message = {"role": "user", "content": "a few words, " * 10}
    values: dict[str, tuple[str, Any]] = {
        "stop": (TEXT, {"prompt": "1", "stop": ["a"] * 780_000}),
        "ids": (TEXT, {"prompt": [1] * 260_000, "user": "a" * 3_000_000}),
        "keys": (TEXT, {"prompt": "1", "logit_bias": {str(n): 1 for n in range(32_000)}, "user": "a" * 3_500_000}),
        "text": (TEXT, {"prompt": "word, " * 650_000}),
        "chat": (CHAT, {"messages": [{"role": "user", "content": "word, " * 650_000}]}),
        "messages": (CHAT, {"messages": [message] * 4_000, "user": "a" * 3_200_000}),
        # Accepted, unlike the others.
        "served": (TEXT, {"prompt": [1] * 20, "max_tokens": 2, "user": "a" * 3_900_000}),
    }
    path, value = values[kind]
    return path, json.dumps(value).encode()


KINDS = ("none", "stop", "ids", "keys", "text", "chat", "messages", "served")


def post(link: http.client.HTTPConnection, path: str, body: bytes) -> int:
    link.request("POST", path, body, {"Content-Type": "application/json"})
    response = link.getresponse()
    response.read()
    return response.status


def flood(port: int, kind: str, niceness: int, until: float, statuses: Any) -> None:
    """Main of a flooder: send the counts of the statuses it received."""
    os.nice(niceness)
    path, body = make_body(kind)
    counts: collections.Counter[int] = collections.Counter()
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while time.time() < until:
        try:
            counts[post(link, path, body)] += 1
        except (OSError, http.client.HTTPException):
            counts[0] += 1
            link.close()
    statuses.send(dict(counts))


def probe(port: int, until: float) -> list[float]:
    """Milliseconds of small requests, one after the other."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    latencies = []
    while time.time() < until:
        start = time.perf_counter()
        assert post(link, TEXT, SMALL) == 200
        latencies.append((time.perf_counter() - start) * 1e3)
        time.sleep(0.005)
    return sorted(latencies)


def prioritize(process: int) -> None:
    """Schedule the present threads of a process in real time, but not its children, present or later."""
    for thread in os.listdir(f"/proc/{process}/task"):
        for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
            os.setpriority(os.PRIO_PROCESS, int(child), FLOOD_NICENESS)
        os.sched_setscheduler(int(thread), os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def measure(port: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Latency percentiles of the probe, and the responses of the flooders."""
    # They start, and the server starts what it needs for large bodies, before the probe.
    start = time.time() + (0 if kind == "none" else 4)
    pipes, processes = [], []
    for _ in range(0 if kind == "none" else options.flooders):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(
            target=flood, args=(port, kind, FLOOD_NICENESS if options.realtime else 19, start + options.seconds, sender)
        )
        process.start()
        pipes.append(receiver)
        processes.append(process)
    time.sleep(max(0.0, start - time.time()))
    if options.realtime:
        prioritize(os.getpid())
    latencies = probe(port, start + options.seconds)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    statuses: collections.Counter[int] = collections.Counter()
    for pipe, process in zip(pipes, processes, strict=True):
        statuses.update(pipe.recv())
        process.join()
    count = len(latencies)
    figures = {"p50_ms": latencies[count // 2], "p99_ms": latencies[count * 99 // 100], "max_ms": latencies[-1]}
    return {
        "probes": count,
        **{name: round(value, 1) for name, value in figures.items()},
        "over_50_ms": sum(latency > 50 for latency in latencies),
        "large_requests": {str(status): number for status, number in statuses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--flooders", type=int, default=4)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--tree", default=str(Path(__file__).parent.parent))
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default all")
    options = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": options.tree}
    command = [sys.executable, "-m", "maxhydra"]
    model = ["model=micro", "data.tokenizer.chat_template=lines"]
    with tempfile.TemporaryDirectory() as folder:
        train = ["run.name=run", "train.steps=1", "train.eval_batches=0", "train.sample.tokens=0"]
        subprocess.run([*command, *model, *train], cwd=folder, env=environment, check=True, capture_output=True)
        serve = [*command, "task=serve", "task.port=0", "task.max_body_mib=8", "checkpoint.load_parameters=outputs/run"]
        process = subprocess.Popen([*serve, *model], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
            probe(port, time.time() + 5)  # compiles
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            for kind in KINDS[1:]:  # starts all threads, and compiles what only a large request needs
                for _ in range(4):
                    post(link, *make_body(kind))
            if options.realtime:
                prioritize(process.pid)
            for kind in options.kinds or KINDS:
                figures = measure(port, kind, options)
                print(json.dumps({"bench": "serve_flood", "kind": kind, **figures}), flush=True)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
