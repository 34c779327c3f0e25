"""Object stores for tests: S3 and GCS servers on loopback, and a file system in memory whose requests can fail."""

import contextlib
import email.message
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from maxhydra.record.checkpoint_manifest import write_manifest

# Credentials of the server, which no file of a run may contain.
KEY, SECRET = "AKIATESTKEYTESTKEY12", "test-secret-of-the-object-store"
BUCKET = "bucket"


class FlakyFileSystem(MemoryFileSystem):
    """flaky://: objects in memory, a log of the writes, and a function that may raise before each request."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    writes: list[str] = []  # noqa: RUF012
    before: Callable[[str, str], None] = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _request(self, operation: str, path: str) -> None:
        type(self).before(operation, path)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._request("find", path)
        return super().find(path, *args, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._request("read", path)
        return super().cat_file(path, *args, **kwargs)

    def get_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._request("read", path)
        return super().get_file(path, *args, **kwargs)

    def put_file(self, local: str, path: str, *args: Any, **kwargs: Any) -> Any:
        self._request("write", path)
        self.writes.append(path)
        return super().put_file(local, path, *args, **kwargs)

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._request("write", path)
        self.writes.append(path)
        return super().pipe_file(path, *args, **kwargs)


@contextlib.contextmanager
def flaky_store() -> Iterator[type[FlakyFileSystem]]:
    """The scheme flaky://, with an empty store."""
    fsspec.register_implementation("flaky", f"{__name__}.{FlakyFileSystem.__name__}", clobber=True)
    FlakyFileSystem.store.clear()
    FlakyFileSystem.writes.clear()
    FlakyFileSystem.before = staticmethod(lambda operation, path: None)
    FlakyFileSystem.clear_instance_cache()
    yield FlakyFileSystem
    FlakyFileSystem.before = staticmethod(lambda operation, path: None)


class Faults:
    """WSGI middleware: a share of the requests fails, with status 500 or a closed connection, and all are delayed."""

    def __init__(self, application: Callable[..., Iterable[bytes]]):
        self._application, self._random, self._lock = application, random.Random(0), threading.Lock()
        self.share, self.seconds = 0.0, 0.0
        self.requests = self.failed = 0
        self.uploads: list[str] = []
        """Paths of the objects that were written, in order."""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            self.uploads.append(environ["PATH_INFO"])
        time.sleep(self.seconds)
        with self._lock:
            fails, resets = self._random.random() < self.share, self._random.random() < 0.5
            self.requests += 1
            self.failed += fails
        if not fails:
            return self._application(environ, start_response)
        if resets:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("injected")
        # The body is read, as a server would: otherwise the client may see a reset instead of the status.
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("500 Internal Server Error", [("Content-Length", "0")])
        return []


class S3Server:
    """moto behind `Faults`, on a free port of loopback."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self.faults = Faults(DomainDispatcherApplication(create_backend_app))
        self._server = make_server("127.0.0.1", 0, self.faults, threaded=True)
        self._server.log = lambda *args: None  # type: ignore[method-assign,assignment]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which clients find the server."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": address, **keys}

    def create_bucket(self) -> None:
        import boto3

        variables = self.variables
        client = boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)

    def close(self) -> None:
        self._server.shutdown()


class GCSServer:
    """A server of the API of Google Cloud Storage with an empty bucket, on a free port of loopback."""

    def __init__(self, on_upload: Callable[[str], None] = lambda name: None) -> None:
        """`on_upload`: called with the name of an object before it is stored."""
        from gcp_storage_emulator import server

        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        server._read_data = _exact_upload(server._read_data, on_upload)
        self._server = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
        self._server.start()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which clients find the server."""
        address = f"http://127.0.0.1:{self._server._api._httpd.server_port}"
        # Without the last one, the client asks another service for the type of the bucket.
        anonymous = {"FSSPEC_GS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        return {"STORAGE_EMULATOR_HOST": address, **anonymous}

    def close(self) -> None:
        self._server.stop()


def _exact_upload(read: Callable[..., Any], on_upload: Callable[[str], None]) -> Callable[..., Any]:
    """Read uploads of two parts byte by byte: the server parses them as e-mail and drops a final carriage return."""

    def read_exactly(handler: Any, query: Any) -> Any:
        content_type = handler.headers.get("Content-Type") or ""
        if not content_type.startswith("multipart/related"):
            return read(handler, query)
        header = email.message.Message()
        header["Content-Type"] = content_type
        boundary = b"--" + str(header.get_param("boundary")).encode()
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        _, meta, content, _ = body.split(boundary)
        newline = b"\r\n" if meta.startswith(b"\r\n") else b"\n"
        parts = [part.removeprefix(newline).removesuffix(newline) for part in (meta, content)]
        [(_, meta), (kind, content)] = [part.split(2 * newline, 1) for part in parts]
        meta = json.loads(meta)
        on_upload(meta["name"])
        return {"meta": meta, "content": content, "content-type": kind.partition(b":")[2].strip().decode()}

    return read_exactly


def write_checkpoint(folder: Path, step: int, *, seed: int = 0, files: int = 4, size: int = 300) -> Path:
    """Write a folder of random files with a manifest, as a checkpoint of a run."""
    rng, path = random.Random(f"{step} {seed}"), folder / "checkpoints" / str(step)
    for number in range(files):
        file = path / ("params" if number % 2 else "rest") / "d" / f"{rng.getrandbits(64):016x}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.randbytes(size))
    (path / "_CHECKPOINT_METADATA").write_text('{"custom_metadata": {"format": 3}}')
    write_manifest(path)
    return path
