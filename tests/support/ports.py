"""Ports for servers that bind them later."""

import random
import socket

# Below the ports that a kernel gives to outgoing connections and to servers that ask for any: nothing else takes these
# before the server has started.
_RANGE = range(15_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nothing uses now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            break
    return found


def free_address() -> str:
    """`127.0.0.1:PORT` with a free port."""
    return f"127.0.0.1:{free_ports(1)[0]}"
