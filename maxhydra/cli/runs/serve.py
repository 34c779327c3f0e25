"""Watch the runs in a browser, live, on this machine: serve [--port N].

A table with search and sort, curves that grow while runs train, runs side by side, the machine, and logs. It only
reads, and listens on 127.0.0.1; from elsewhere, `ssh -L 8080:127.0.0.1:8080 host`.

maxhydra runs serve
"""

import argparse

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8080, help="0 takes any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="an address of this machine to listen on")


def run(asked: argparse.Namespace) -> int:
    registry = Registry(asked.outputs)
    try:
        server = Server(registry, host=asked.host, port=asked.port)
    except (OSError, OverflowError) as error:
        hint = "--port 0 takes any that is free"
        raise ConfigError(Problem("--port", f"cannot be listened on: {error}", value=asked.port, hint=hint)) from None
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
        registry.close()
    return 0
