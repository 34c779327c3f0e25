"""Who may use the server: clients with the API key, or local clients."""

import hmac

from maxhydra.decode.openai_server.http11 import HttpError, RequestHead
from maxhydra.record.loopback import is_allowed_host


class Access:
    """Accepts clients with the API key; without a key, local clients that address a loopback name.

    Web pages in a browser can send requests to this machine too. They cannot send JSON to another origin without a CORS
    preflight, and DNS rebinding shows in the Host header.
    """

    def __init__(self, key: str | None, *, is_local: bool):
        """`is_local`: the server listens on a loopback address."""
        self._key, self._is_local = None if key is None else key.encode(), is_local

    def check(self, head: RequestHead) -> None:
        """Raise HttpError if the request is not allowed."""
        if head.path == "/health" or (head.path == "/" and self._key is not None):
            # The page itself is public; its requests send the key that the user enters.
            return
        if self._key is not None:
            kind, _, key = head.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
                message = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                raise HttpError(401, message, code="invalid_api_key")
        elif self._is_local and not is_allowed_host(head.headers.get("host", "localhost")):
            message = "the Host header is not a loopback name; set task.host or task.api_key_env to allow others"
            raise HttpError(403, message)
        content_type = head.headers.get("content-type", "").partition(";")[0].strip()
        if head.method == "POST" and content_type != "application/json":
            raise HttpError(415, "the body must be JSON: send the header Content-Type: application/json")
