"""Host header check of the local HTTP servers, as a defence against DNS rebinding.

A web page can make a browser send requests to this machine under a host name of the attacker that resolves to
127.0.0.1. Such requests carry that name in their Host header, so a local server accepts only its own names.
"""

from collections.abc import Collection

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_allowed_host(header: str, allowed: Collection[str] = LOOPBACK_NAMES) -> bool:
    """Return True if a Host header, with or without a port, names one of the `allowed` hosts."""
    name = header if header.endswith("]") else header.rpartition(":")[0] or header
    return name.lower() in allowed
