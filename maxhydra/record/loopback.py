"""Host header check of the local HTTP servers, as a defence against DNS rebinding.

A web page can make a browser send requests to this machine under a host name of the attacker that resolves to
127.0.0.1. Such requests carry that name in their Host header, so a local server accepts only its own names.
"""

from collections.abc import Collection

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_allowed_host(header: str, allowed: Collection[str] = LOOPBACK_NAMES, *, port: int | None = None) -> bool:
    """Return True if a Host header names one of the `allowed` hosts: with any port or none, or with that `port`."""
    if port is not None:
        return header.lower() in {f"{name}:{port}" for name in allowed}
    name = header if header.endswith("]") else header.rpartition(":")[0] or header
    return name.lower() in allowed
