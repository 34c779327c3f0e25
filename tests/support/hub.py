"""A Hugging Face hub on loopback: repositories of folders, with gated ones, downloads and commits."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_" + "t" * 20


class Hub(ThreadingHTTPServer):
    """Repositories by name. `requests` records method, path and token of every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repo: str, folder: Path) -> None:
        self.repos[repo] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def commit(self, repo: str) -> str:
        """A commit hash that changes with the content."""
        digests = [f"{name} {hashlib.sha1(data).hexdigest()}" for name, data in sorted(self.repos[repo].items())]
        return hashlib.sha1("\n".join(digests).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's API that snapshot_download, create_repo and upload_folder use."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self._log()
        if path.startswith("api/models/"):
            self._metadata(path.removeprefix("api/models/"))
        elif "/resolve/" in path:
            self._file(path)
        else:
            self._fail(404, "", "Not found")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = self._log(), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._fail(401, "", "Invalid credentials")
        if path == "api/repos/create":
            fields = json.loads(body)
            repo = f"{fields['organization']}/{fields['name']}" if fields.get("organization") else fields["name"]
            self.server.repos.setdefault(repo, {})
            return self._send(json.dumps({"url": f"{self.server.url}/{repo}"}).encode())
        repo, action = "/".join(path.split("/")[2:4]), path.split("/")[4]
        if action == "preupload":
            modes = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = [{"path": file["path"], **modes} for file in json.loads(body)["files"]]
            return self._send(json.dumps({"files": files}).encode())
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        oid = self.server.commit(repo)
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{repo}/commit/{oid}"}
        self._send(json.dumps(answer).encode())

    def _metadata(self, path: str) -> None:
        repo, rest = "/".join(path.split("/")[:2]), path.split("/")[2:]
        if (files := self.server.repos.get(repo)) is None:
            return self._fail(404, "RepoNotFound", "Repository not found")
        commit = self.server.commit(repo)
        if rest and rest[-1] not in ("main", commit):
            return self._fail(404, "RevisionNotFound", "Invalid rev id")
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._send(json.dumps(entries).encode())
        answer: dict[str, Any] = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        self._send(json.dumps(answer).encode())

    def _file(self, path: str) -> None:
        owner, name, resolve, commit, file = path.split("/")
        repo = f"{owner}/{name}"
        assert resolve == "resolve" and commit == self.server.commit(repo)
        if repo in self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._fail(401, "GatedRepo", "Access to this model is restricted")
        data = self.server.repos[repo][file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        self._send(data, headers=headers)

    def _fail(self, status: int, code: str, message: str) -> None:
        self._send(b"{}", status=status, headers={"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, data: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _log(self) -> str:
        path = self.path.partition("?")[0].strip("/")
        self.server.requests.append((self.command, path, self.headers.get("Authorization")))
        return path

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
