"""HTTP server of the dashboard: its page, its static files, JSON for reading, and actions by POST."""

import json
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from maxhydra.config.errors import ConfigError
from maxhydra.record.atomic_io import to_json
from maxhydra.runs.access import Access
from maxhydra.runs.dashboard import Dashboard
from maxhydra.runs.machine import machine
from maxhydra.runs.page import concat, read_asset
from maxhydra.runs.registry import Registry

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'"
# A report comes from a run's files. An opaque origin keeps its script from this server, whose page may act.
REPORT_POLICY = "sandbox allow-scripts allow-downloads"
# Maximum number of runs in one request.
MAX_RUNS = 200
# Maximum number of fields in the query of a request.
MAX_FIELDS = 1000
# Maximum size of the body of a request.
MAX_BODY = 10_000
STATIC = "/static/"
TYPES = {".js": "text/javascript", ".css": "text/css"}


def read_static_files() -> dict[str, tuple[str, bytes]]:
    """Type and content of the scripts and styles of the dashboard, by their path below /static/."""
    web = resources.files("maxhydra.runs").joinpath("web")
    folders = {"": web, "dashboard/": web.joinpath("dashboard"), "vendor/": web.joinpath("vendor")}
    return {
        prefix + file.name: (TYPES[suffix], file.read_bytes())
        for prefix, folder in folders.items()
        for file in folder.iterdir()
        if (suffix := file.name[file.name.rfind(".") :]) in TYPES
    }


class Server(ThreadingHTTPServer):
    """Serves one folder of runs at `url`; port 0 chooses a free port."""

    daemon_threads = True

    def __init__(self, registry: Registry, *, host: str, port: int, needs_token: bool = False):
        super().__init__((host, port), _Handler)
        self.dashboard = Dashboard(registry)
        self.access = Access(host, self.server_port, needs_token=needs_token)
        name = socket.gethostname() if host in ("", "0.0.0.0") else host
        query = f"?{urlencode({'token': self.access.token})}" if self.access.token else ""
        self.url = f"http://{name}:{self.server_port}/{query}"
        self.static = read_static_files()
        self.page = Template(read_asset("dashboard.html")).substitute(
            title=concat(f"{registry.root.resolve().name} · maxhydra"),
            root=concat(str(registry.root)),
            csrf=concat(self.access.csrf_token),
        )

    def api_response(self, path: str, query: dict[str, list[str]]) -> Any:
        """Response to an API request as JSON-compatible data. Raises KeyError for unknown paths."""
        dashboard, runs = self.dashboard, query.get("run", [])[:MAX_RUNS]
        first = {name: values[0] for name, values in query.items()}
        match path:
            case "/api/runs":
                limit = first.get("newest", "")
                return dashboard.newest_runs(int(limit)) if limit else dashboard.runs(first.get("since", ""))
            case "/api/select":
                return dashboard.select(query.get("condition", []))
            case "/api/keys":
                return dashboard.keys()
            case "/api/values":
                return dashboard.values(first["key"])
            case "/api/curves":
                return dashboard.curves(runs)
            case "/api/compare":
                return dashboard.compare(runs)
            case "/api/sweep":
                largest = first["largest"] == "1" if first.get("largest") else None
                return dashboard.sweep(first["name"], first.get("metric"), largest)
            case "/api/evaluations":
                return dashboard.evaluations(runs)
            case "/api/profiles":
                return dashboard.profiles(first["run"])
            case "/api/log":
                return dashboard.log(first["run"], first.get("text", ""))
            case "/api/rollouts":
                return dashboard.rollouts(first["run"], first)
            case "/api/machine":
                return machine(dashboard.registry.root)
        raise KeyError(path)

    def report(self, query: dict[str, list[str]]) -> str:
        """The report of a run or a sweep. Raises KeyError if there is none."""
        if "sweep" in query:
            return self.dashboard.sweep_report(query["sweep"][0])
        return self.dashboard.report(query["run"][0])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print unexpected errors only: clients may hang up at any time, as a browser does with a closed page."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def start(self) -> threading.Thread:
        """Serve in the background, until `shutdown`."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        return thread


def _serialize(response: Any) -> str:
    """JSON of a response. Nearly all are plain values, for which the conversion of `to_json` would take most time."""
    try:
        return json.dumps(response, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return to_json(response)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "maxhydra", ""
    timeout = 60

    def do_GET(self) -> None:
        access = self.server.access
        if not access.is_own_host(self.headers):
            self._send(HTTPStatus.FORBIDDEN, b"unknown Host header; use the URL of this server\n", "text/plain")
            return
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=MAX_FIELDS)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"the address is not a valid URL\n", "text/plain")
            return
        if url.path == "/" and access.is_token(query.get("token", [""])[0]):
            # The cookie replaces the token in the address, which is shown, shared and stored in the history.
            self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": access.cookie()})
        elif not access.may_read(self.headers):
            text = b"open the URL with ?token= that `maxhydra runs serve` has printed\n"
            self._send(HTTPStatus.UNAUTHORIZED, text, "text/plain")
        elif url.path == "/":
            policy = {"Content-Security-Policy": POLICY}
            self._send(HTTPStatus.OK, self.server.page.encode(), "text/html", policy)
        elif url.path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, b"", "image/x-icon")
        elif url.path == "/report":
            self._send_report(query)
        elif (found := self.server.static.get(url.path.removeprefix(STATIC))) and url.path.startswith(STATIC):
            self._send(HTTPStatus.OK, found[1], found[0])
        else:
            self._send_json(lambda: self.server.api_response(url.path, query))

    def do_POST(self) -> None:
        access, length = self.server.access, self.headers.get("Content-Length", "")
        self.close_connection = True
        if not (access.is_own_host(self.headers) and access.may_act(self.headers)):
            self._send(HTTPStatus.FORBIDDEN, b"only the page of this server may post\n", "text/plain")
        elif not self.path.startswith("/api/") or not length.isdigit() or int(length) > MAX_BODY:
            self._send(HTTPStatus.NOT_FOUND, b'{"problem": "not found"}', "application/json")
        else:
            body = self.rfile.read(int(length))
            action = self.path.removeprefix("/api/")
            self._send_json(lambda: self.server.dashboard.act(action, json.loads(body)))

    def _send_report(self, query: dict[str, list[str]]) -> None:
        try:
            content = self.server.report(query)
        except (KeyError, OSError, ValueError):
            self._send(HTTPStatus.NOT_FOUND, b"no such run or sweep\n", "text/plain")
        except ConfigError as error:
            self._send(HTTPStatus.BAD_REQUEST, f"{error}\n".encode(), "text/plain")
        else:
            self._send(HTTPStatus.OK, content.encode(), "text/html", {"Content-Security-Policy": REPORT_POLICY})

    def _send_json(self, respond: Callable[[], Any]) -> None:
        try:
            content = _serialize(respond())
        except (KeyError, ValueError, TypeError):
            self._send(HTTPStatus.NOT_FOUND, b'{"problem": "not found"}', "application/json")
        except ConfigError as error:
            self._send(HTTPStatus.BAD_REQUEST, json.dumps({"problem": str(error)}).encode(), "application/json")
        else:
            self._send(HTTPStatus.OK, content.encode(), "application/json")

    def _send(
        self, status: HTTPStatus, content: bytes, content_type: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Log nothing: a page polls every two seconds."""
