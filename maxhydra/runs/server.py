"""HTTP server of the dashboard, only for requests that address it by its own host name.

DNS rebinding protection: a page of another site can make a browser send requests to 127.0.0.1, also under a host name
that resolves to it; such requests carry a different Host header and are rejected.

The only change that a request can cause is a profile of a live run, by POST from a client on this machine. A page of
another site cannot send it: JSON needs a CORS preflight, which is not answered, and an Origin header must be ours.
"""

import ipaddress
import json
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from maxhydra.config.errors import ConfigError
from maxhydra.record.atomic_io import to_json
from maxhydra.record.loopback import LOOPBACK_NAMES, is_allowed_host
from maxhydra.runs.dashboard import Dashboard, machine
from maxhydra.runs.page import Html, live_page, read_asset
from maxhydra.runs.registry import Registry

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# Maximum number of runs in one request.
MAX_RUNS = 32
# Maximum number of fields in the query of a request.
MAX_FIELDS = 1000
# Maximum size of the body of a request.
MAX_BODY = 10_000


class Server(ThreadingHTTPServer):
    """Serves one folder of runs at `url`; port 0 chooses a free port."""

    daemon_threads = True

    def __init__(self, registry: Registry, *, host: str, port: int):
        super().__init__((host, port), _Handler)
        self.dashboard = Dashboard(registry)
        self.names = (*LOOPBACK_NAMES, host.lower())
        self.url = f"http://{host}:{self.server_port}/"
        title, data = f"{registry.root.resolve().name} · maxhydra", {"root": str(registry.root)}
        bar, body = Html(read_asset("dashboard_bar.html")), Html(read_asset("dashboard.html"))
        self.page = live_page(title, body, bar=bar, data=data).encode()

    def api_response(self, path: str, query: dict[str, list[str]]) -> Any:
        """Response to an API request as JSON-compatible data. Raises KeyError for unknown paths."""
        dashboard, runs = self.dashboard, query.get("run", [])[:MAX_RUNS]
        match path:
            case "/api/runs":
                return dashboard.runs(query.get("since", [""])[0])
            case "/api/select":
                return dashboard.select(query.get("condition", []))
            case "/api/keys":
                return dashboard.keys()
            case "/api/values":
                return dashboard.values(query["key"][0])
            case "/api/curves":
                return dashboard.curves(runs)
            case "/api/compare":
                return dashboard.compare(runs)
            case "/api/profiles":
                return dashboard.profiles(query["run"][0])
            case "/api/log":
                return dashboard.log(query["run"][0])
            case "/api/rollouts":
                return dashboard.rollouts(query["run"][0], {name: values[0] for name, values in query.items()})
            case "/api/machine":
                return machine(dashboard.registry.root)
        raise KeyError(path)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print unexpected errors only: clients may hang up at any time, as a browser does with a closed page."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def start(self) -> threading.Thread:
        """Serve in the background, until `shutdown`."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        return thread


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "maxhydra", ""
    timeout = 60

    def do_GET(self) -> None:
        if not is_allowed_host(self.headers.get("Host", ""), self.server.names, port=self.server.server_port):
            self._send(HTTPStatus.FORBIDDEN, b"unknown Host header; use the URL of this server\n", "text/plain")
            return
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=MAX_FIELDS)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"the address is not a valid URL\n", "text/plain")
            return
        if url.path == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html")
        elif url.path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, b"", "image/x-icon")
        else:
            self._send_json(lambda: self.server.api_response(url.path, query))

    def do_POST(self) -> None:
        host = self.headers.get("Host", "")
        is_own_host = is_allowed_host(host, self.server.names, port=self.server.server_port)
        is_same_origin = self.headers.get("Origin", f"http://{host}") == f"http://{host}"
        is_json = self.headers.get("Content-Type", "").partition(";")[0].strip() == "application/json"
        is_local = ipaddress.ip_address(self.client_address[0].partition("%")[0]).is_loopback
        length = self.headers.get("Content-Length", "")
        self.close_connection = True
        if not (is_own_host and is_same_origin and is_json and is_local):
            self._send(HTTPStatus.FORBIDDEN, b"only the page of this server may post, on its machine\n", "text/plain")
        elif self.path != "/api/profile" or not length.isdigit() or int(length) > MAX_BODY:
            self._send(HTTPStatus.NOT_FOUND, b'{"problem": "not found"}', "application/json")
        else:
            body = self.rfile.read(int(length))
            self._send_json(lambda: self.server.dashboard.request_profile(str(json.loads(body)["run"])))

    def _send_json(self, respond: Callable[[], Any]) -> None:
        try:
            content = to_json(respond())
        except (KeyError, ValueError, TypeError):
            self._send(HTTPStatus.NOT_FOUND, b'{"problem": "not found"}', "application/json")
        except ConfigError as error:
            self._send(HTTPStatus.BAD_REQUEST, json.dumps({"problem": str(error)}).encode(), "application/json")
        else:
            self._send(HTTPStatus.OK, content.encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Log nothing: a page polls every two seconds."""
