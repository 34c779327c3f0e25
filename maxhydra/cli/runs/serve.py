"""Serve a live dashboard of the runs on this machine: serve [--port N].

A table with search and sort, live curves, side-by-side comparison, machine load, and logs. The server is read-only and
listens on 127.0.0.1; from another machine, use `ssh -L 8080:127.0.0.1:8080 host`.

maxhydra runs serve
"""

import argparse

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8080, help="0: any free port")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    try:
        server = Server(registry, host=args.host, port=args.port)
    except (OSError, OverflowError) as error:
        hint = "--port 0 chooses a free port"
        raise ConfigError(
            Problem("--port", f"cannot listen on this port: {error}", value=args.port, hint=hint)
        ) from None
    print(f"{server.url}  (Ctrl-C to stop)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
        registry.close()
    return 0
