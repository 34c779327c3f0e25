"""Who may ask the server."""

import hmac

from maxhydra.decode.openai_server.http11 import HttpError, RequestHead

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Access:
    """Who may ask: holders of the key; without one, programs that mean this machine.

    A web page that a browser shows can send requests to this machine too. It cannot send JSON to another origin without
    asking, and a page whose name was made to point here (DNS rebinding) gives itself away in the Host header.
    """

    def __init__(self, key: str | None, *, is_local: bool):
        self._key, self._is_local = None if key is None else key.encode(), is_local

    def check(self, head: RequestHead) -> None:
        if head.path == "/health":
            return
        if self._key is not None:
            kind, _, given = head.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
                raise HttpError(
                    401, "the API key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key"
                )
        elif self._is_local:
            host = head.headers.get("host", "localhost")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() not in LOOPBACK:
                raise HttpError(
                    403, "the Host header names another machine; set task.host or task.api_key_env to allow it"
                )
        if (
            head.method == "POST"
            and head.headers.get("content-type", "").partition(";")[0].strip() != "application/json"
        ):
            raise HttpError(415, "the body is to be JSON: Content-Type: application/json")
